// Tensors that share a scale, because a runtime fuses them: it reads the scale
// of one of them for all.

#ifndef QUANTD_CLIENT_MODELS_TIE_GROUPS_H_
#define QUANTD_CLIENT_MODELS_TIE_GROUPS_H_

#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/tensor.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"

namespace quantd {

// A pattern of names, such as "{layer}.self_attn.{q,k,v}_proj.weight":
//   {A,B,...}  one of these texts
//   {NAME}     one or more characters, the same for all tensors of a group
//   *          any characters, which may differ within a group
// Plain value.
class TiePattern {
 public:
  // Errors: ARGUMENT_INVALID; also for a pattern that never ties two tensors.
  static absl::StatusOr<TiePattern> Parse(absl::string_view text);

  // The pattern with what {NAME} stands for, such as
  // "layers.0.self_attn.{q,k,v}_proj.weight": the same for all names of a
  // group. Nothing for a name that does not match.
  std::optional<std::string> LabelOf(absl::string_view name) const;

  const std::string& text() const { return text_; }

 private:
  enum class Kind { kText, kChoice, kCapture, kAny };
  struct Piece {
    Kind kind;
    // Text as in the pattern.
    std::string text;
    std::vector<std::string> choices = {};
  };

  bool Match(size_t piece, absl::string_view rest,
             std::vector<absl::string_view>* captures) const;

  std::string text_;
  std::vector<Piece> pieces_;
};

// Patterns of what runtimes fuse, by the usual names: q/k/v, gate/up and w1/w3,
// of experts as well.
const std::vector<std::string>& DefaultTies();

struct TieOptions {
  // Take precedence over the defaults.
  std::vector<TiePattern> patterns;
  bool has_defaults = true;
  // Groups of the defaults whose tensors have different specs are an error. If
  // not, they are not tied.
  bool is_strict = false;
};

// A tensor that is quantized. Plain value.
struct TieCandidate {
  const files::FileTensor* tensor;
  EncodingSpec spec;
};

// Tensors that share their outer scale. Plain value.
struct TieGroup {
  // TiePattern::LabelOf.
  std::string label;
  std::vector<const files::FileTensor*> tensors;
  // If not, they have one spec, and scales of their own.
  bool shares_scale = true;
};

// "X.experts" of the weights of the experts of a layer: X.experts.N.Y.weight,
// and X.experts.gate_up_proj and down_proj, which have those of all. Empty for
// another name.
absl::string_view ExpertsOf(absl::string_view name);

// The groups of two tensors or more whose specs have one outer scale, in the
// order of their first tensors. A tensor is in the group of the first pattern
// that matches it.
// Errors: ARGUMENT_INVALID for a pattern of `options` that ties no tensors, or
// some that cannot share a scale.
absl::StatusOr<std::vector<TieGroup>> FindTies(
    const TieOptions& options, const std::vector<TieCandidate>& candidates);

// The groups of two tensors or more, whatever becomes of them, in the order of
// their first tensors. A tensor is in the group of the first pattern that
// matches it. With the defaults, groups that share no scale follow: the
// matrices of all experts of a layer, which runtimes take as one module.
// Errors: ARGUMENT_INVALID for a pattern of `options` that ties no tensors.
absl::StatusOr<std::vector<TieGroup>> FindTiedTensors(
    const TieOptions& options,
    const std::vector<const files::FileTensor*>& tensors);

// The groups whose tensors can share a scale of a spec: the outer one, or the
// only one of floats.
std::vector<TieGroup> GroupsThatShare(const SpecTemplate& spec,
                                      const std::vector<TieGroup>& groups);

// A group of tensors whose statistics are stored. Plain value.
struct NamedTies {
  // TiePattern::LabelOf.
  std::string label;
  std::vector<std::string> tensors;
  // Without one outer scale they share one encoding.
  bool one_encoding = false;
};

// The groups of two tensors or more, in the order of their first tensors. A
// tensor is in the group of the first pattern that matches it. Those of
// patterns in `options` share one encoding where their spec has no outer scale;
// those of the defaults are not tied then, nor if their specs differ.
// `spec_of`  null for a tensor that is left out.
// Errors: ARGUMENT_INVALID for a pattern of `options` that ties no tensors, or
// some of different specs.
absl::StatusOr<std::vector<NamedTies>> FindNamedTies(
    const TieOptions& options, const std::vector<std::string>& names,
    absl::FunctionRef<const EncodingSpec*(const std::string& name)> spec_of);

// True if a spec has outer scales.
bool HasOuterScales(const EncodingSpec& spec);
// True if tensors can share a scale of a spec: the outer one, or that of floats
// from the extremes. Depends on the shape as well.
bool MayShareScale(const EncodingSpec& spec);

// The largest magnitudes of tensors, of which those of a group share theirs.
// Thread-safe.
class TiedMaxima {
 public:
  // `groups` must stay.
  explicit TiedMaxima(const std::vector<TieGroup>& groups);

  // Makes a tensor of a group share the scale: *outer_maximum becomes the
  // maximum of the group, which the first call reads, and *spec gets the range
  // that follows from it if it has no outer scale. Of a tensor without a group
  // *outer_maximum becomes OuterMaximumFor.
  void Tie(const files::FileTensor& tensor, EncodingSpec* spec,
           std::vector<float>* outer_maximum);

 private:
  struct Shared {
    const TieGroup* group;
    std::once_flag once;
    float maximum = 0.0f;
  };

  std::deque<Shared> shared_;
  absl::flat_hash_map<const files::FileTensor*, Shared*> by_tensor_;
};

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_TIE_GROUPS_H_
