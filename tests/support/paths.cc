#include "tests/support/paths.h"

namespace quantd {

std::string TestDataFolder() { return QUANTD_TEST_DATA_FOLDER; }

std::string OraclesFolder() { return QUANTD_ORACLES_FOLDER; }

std::string QuantdBinary() { return QUANTD_BINARY; }

}  // namespace quantd
