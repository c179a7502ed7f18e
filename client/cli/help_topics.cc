#include "client/cli/help_topics.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/models/spec_syntax.h"

namespace quantd::cli {
namespace {

constexpr char kSpecs[] =
    R"(A spec is one word. The format comes first; the rest is in any order:

  FORMAT[:GRANULARITY][:SYMMETRY][:METHOD][:OPTION...]

  int8:per-channel:mse         a scale per channel, least squared error
  uint8:percentile=0.999       all but a thousandth of the elements
  int4:group:32:half-step      groups of 32 along the last axis
  int8:best-of=mse,percentile  the better of the two, for each scale
  mxfp4_e2m1:rule=even         blocks of 32 under E8M0 scales

  --spec SPEC           for all tensors, or for all that no pattern matches
  --spec PATTERN=SPEC   for tensors whose name matches (* and ?); the first
                        pattern that matches counts. Without a SPEC for all
                        others these are left as they are. A pattern that
                        takes nothing is an error: put the narrower one first
  --spec @FILE          the file has one of these on each line

  quantize -o OUT.gguf also takes q4_0, q4_1, q5_0, q5_1, q8_0, q4_K, q5_K and
  q6_K. It makes these blocks itself: they need no server. sweep FILE and
  evaluate measure them too.

Formats:
)";

constexpr char kRestOfSpecs[] =
    R"(  Codebooks need their entries, entries=

Granularities; the default is per-tensor, or the format's own blocks:
  per-tensor            one scale
  per-channel[:AXIS]    a scale for each index of an axis; default axis 0
  group:N[:AXIS]        a scale for N elements along the last axis, or another
  block=N,N,...         a number for each dimension, 0 for the whole of it
  A tensor of fewer than two dimensions has one scale, but with block=.

Symmetries; the default is strict for signed formats, else asymmetric:
  strict                the same range on both sides, without -128
  full-range            the same, with -128
  half-step             the same, around half a step: write it below 8 bits
  asymmetric            with a zero point
  aimet                 as AIMET: the least scale on all codes without clipping
  A strict range leaves one code unused: one of 16 at 4 bits, one of 4 at 2.
  On weights in groups of 32, half-step has 0.2 dB more SQNR at 4 bits, 1 dB at
  3 and 2.9 dB at 2. Strict is better in groups of a few elements, as those of
  3 x 3 convolutions, for the largest of them is hit exactly.

Methods; the default is minmax:
  minmax                from the smallest to the largest element
  percentile[=KEPT]     that part of the elements; default 0.999
  mse[=STEPS]           least squared error, of so many ranges
  sqnr[=WEIGHT]         the same; clipped elements count 3 times, or so often
  entropy[=STEPS]       least Kullback-Leibler divergence
  fixed=MIN,MAX         this range
  moving-average        averaged over the contributions of one source
  best-of=METHOD,...    of these the one with the least error

Options:
  scale=TYPE            float32, float16, bfloat16, e8m0, e4m3 or integer
  power-of-two          round scales up to powers of two
  rule=RULE             of e8m0 scales: floor, ceil, even or rceil
  no-saturation         floats: overflow becomes infinity or NaN
  real-zero-point       asymmetric: zero points between codes, not rounded
  tail=SIDE             percentile: magnitude, both, upper or lower
  steps=N               mse, sqnr, entropy: ranges to try
  bins=N                entropy: linear bins
  mantissa-bits=N       searches: finer histograms than 7 bits
  entries=N,N,...       codebooks: the entries in ascending order, or a file
  importance[=INPUTS]   mse, sqnr, best-of: errors count by the mean square of
                        the inputs of their column, from stored statistics of
                        that tensor; default MODULE.input for MODULE.weight.
                        --inputs says of which model. Write %3A for ":" in its
                        name
  importance-axis=N     the dimension that has the inputs; default the last

A spec may also be JSON, which says all of an EncodingSpec of proto/:
  {"spec":{"format":"NUMBER_FORMAT_INT4"},"granularity":"group:32"}
--spec with a pattern too, whatever characters the pattern has:
  {"pattern":"a=b.*","spec":"int4:group:32"}

What granularity costs:
  An encoding takes 4 bytes for a scale, and 4 more with zero points. So int4
  takes 5 bits for an element in groups of 32, and 4.25 in groups of 128.
  Statistics keep a histogram for each scale. Of a float32 matrix of 1,024 by
  1,024 they take, in sizes of the matrix:

  per-tensor    per-channel    group:128    group:32    group:16
        0.01            0.4          1.5         2.5         3.1

  Of bfloat16 it is twice that. A sweep reads all of it. Statistics in finer
  blocks serve every coarser spec: group:16 serves group:32 and per-channel.
)";

constexpr char kServers[] =
    R"(--server, or QUANTD_SERVER, says where quantd is:

  HOST or HOST:PORT        the port is 8430 where none is given
  unix:/PATH or /PATH      a unix socket
  dns:///HOST:PORT         all addresses of a name, in turn with --balance
  ipv4:HOST:PORT,HOST:PORT several replicas, in turn

It is no URL: leave out http:// and https://. The default is 127.0.0.1:8430.

TLS:
  --tls                    trust the system's CA certificates
  --tls-ca FILE            trust those of a PEM file
  --tls-certificate FILE --tls-key FILE
                           if the server wants a client certificate
  --token-file FILE        if it wants a bearer token

When the server is away or busy, quantctl tries again for 60 s; --retry-for
changes that, and 0 means once. One line on the terminal says why and for how
long. Errors that waiting cannot mend end the command at once: TLS on one side
only, a certificate that is not trusted, a server that is not quantd.

Every call may be repeated without harm. A stream of tensors goes on after the
last tensor that was answered.
)";

constexpr char kJson[] =
    R"(With --json a command prints one document on stdout, and no table. Its first
field is json_version, now 1: it grows when a field goes or changes its meaning.
New fields may come at any time.

  quantctl evaluate model.safetensors --spec int4:group:32 --json |
    jq '.tensors[] | {name, sqnr_db: .candidates[0].sqnr_db}'

Fields have the units in their names: _bytes, _db, _seconds, _count. Infinities
and NaN are null. Where a tensor failed its entry has

  "error": {"code": "NOT_FOUND", "reason": "ENCODING_NOT_FOUND", "message": ""}

and the exit code is 1. An error that ends the command is a document with error
alone. The reasons are stable; proto/ lists those of each call.

With --progress-fd N a command that handles many tensors writes lines such as

  {"done_bytes":4096,"total_bytes":8192,"tensor":"fc1.weight"}

to file descriptor N while it runs, also with --quiet; commands that do not read
tensors write done_count and total_count. quantctl --arguments FILE takes the
words of its command line from a file, each ended by a NUL, however many.

encodings get, and encodings put --json, print protobuf JSON of
quantd.v1.StoredEncoding instead, without json_version. So are the entries of
encodings list. The fields of all other documents are in client/cli/README.md.
)";

constexpr char kExitCodes[] =
    R"(  0  success
  1  the server or at least one tensor reported an error
  2  the command line makes no sense
  3  the server could not be reached
  4  a file could not be read or written
)";

constexpr char kEnvironment[] =
    R"(  QUANTD_SERVER              default of --server
  QUANTD_TLS_CA              default of --tls-ca
  QUANTD_CLIENT_CERTIFICATE  default of --tls-certificate
  QUANTD_CLIENT_KEY          default of --tls-key
  QUANTD_TOKEN_FILE          default of --token-file
  NO_COLOR                   no emphasis in tables
  GRPC_VERBOSITY             what gRPC itself says on stderr; default NONE
)";

// In lines of at most 80 columns.
std::string Formats() {
  constexpr size_t kMaxColumns = 80;
  const std::string list = FormatList();
  std::string text;
  size_t columns = 0;
  for (const absl::string_view name : absl::StrSplit(list, ", ")) {
    // With a space before and a comma behind.
    if (columns + name.size() + 2 > kMaxColumns) {
      absl::StrAppend(&text, "\n");
      columns = 0;
    }
    const std::string item = absl::StrCat(columns == 0 ? "  " : " ", name, ",");
    absl::StrAppend(&text, item);
    columns += item.size();
  }
  text.pop_back();
  return absl::StrCat(text, "\n");
}

}  // namespace

std::vector<HelpTopic> HelpTopics() {
  return {{"specs", "How to say what a tensor becomes",
           absl::StrCat(kSpecs, Formats(), kRestOfSpecs)},
          {"servers", "Where the server is, and when it is away", kServers},
          {"json", "What --json prints", kJson},
          {"exit-codes", "Exit codes", kExitCodes},
          {"environment", "Environment", kEnvironment}};
}

}  // namespace quantd::cli
