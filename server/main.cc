#include "server/run_quantd.h"

int main(int argc, char** argv) {
  return quantd::server::RunQuantd(argc, argv);
}
