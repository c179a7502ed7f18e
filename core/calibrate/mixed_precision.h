// One spec for each tensor of a model.

#ifndef QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_
#define QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/types/span.h"
#include "core/calibrate/mixture_search.h"
#include "core/calibrate/precision_option.h"
#include "core/parallel/time_slice.h"

namespace quantd::core {

struct Mixture {
  // [tensor count] index into the tensor's options.
  std::vector<int> choice;
  bool target_met = true;
};

// Chooses one in steps. Not thread-safe.
class MixtureChooser {
 public:
  // As SmallestMixture and BestMixture, which say what is chosen. `tensors`
  // must outlive the chooser.
  static MixtureChooser Smallest(absl::Span<const TensorOptions> tensors,
                                 double min_sqnr_db);
  static MixtureChooser Best(absl::Span<const TensorOptions> tensors,
                             int64_t max_size_bytes);

  // What it takes at most: for each tensor a hull on the heap, a place in both
  // queues and in three choices, for each option of it a place in its hull; and
  // beside all that, when a tensor has so many options.
  static constexpr int64_t kTensorBytes = 116;
  static constexpr int64_t kOptionBytes = sizeof(int);
  static int64_t MemoryBytes(int64_t options);

  // Goes on until the slice is over, by one tensor at least; answers whether
  // all is chosen.
  bool Run(const TimeSlice& slice);
  // Once, after that.
  Mixture Take() { return std::move(mixture_); }

 private:
  enum class Stage {
    kSmallest,
    kHulls,
    kSteps,
    kLook,
    kFill,
    kSum,
    kUniform,
    kCompare,
    kOffer,
    kSearch,
    kDone
  };
  // What is filled.
  enum class Start { kRelaxed, kUniform, kSearched };

  // From one option on the hull of a tensor to the next.
  struct Step {
    double slope;
    size_t tensor;
    // The index in the hull of where it leads.
    size_t next;

    // Steepest first, then in order of tensors.
    bool operator<(const Step& other) const {
      if (slope != other.slope) return slope < other.slope;
      return tensor > other.tensor;
    }
  };

  // What an option of a tensor would save.
  struct Saving {
    double noise;
    size_t tensor;
    int option;

    bool operator<(const Saving& other) const {
      if (noise != other.noise) return noise < other.noise;
      return tensor > other.tensor;
    }
  };

  // One spec for all tensors.
  struct Uniform {
    int spec_index;
    absl::int128 size_bytes;
    double noise;
  };

  MixtureChooser(absl::Span<const TensorOptions> tensors, Stage stage);

  // One tensor of a stage, or one step of the search.
  void RunOne();
  // To a stage that takes the tensors in order.
  void Begin(Stage stage);
  void EndHulls();
  void EndSteps();
  void EndSum();
  void EndSearch();
  void ChooseSmallest(const TensorOptions& options);
  void BeginHull(size_t tensor);
  void AddToUniforms(const TensorOptions& options);
  bool PickUniform();
  void PushStep(size_t tensor, size_t next);
  void TakeStep();
  void LookAt(size_t tensor);
  void TakeSaving();
  void Choose(size_t tensor, int option);
  int64_t MoreBytes(size_t tensor, int to) const;
  bool Fits(int64_t bytes) const { return bytes <= left_; }

  absl::Span<const TensorOptions> tensors_;
  Stage stage_;
  double min_sqnr_db_ = 0;
  int64_t max_size_bytes_ = 0;
  Start start_ = Start::kRelaxed;
  // What is filled, and the bytes that it does not spend.
  std::vector<int> choice_;
  absl::int128 left_ = 0;
  // The tensor that comes next, where a stage takes them in order.
  size_t next_ = 0;
  std::vector<std::vector<int>> hulls_;
  // Those of the specs that all tensors so far have.
  std::vector<Uniform> uniforms_;
  int uniform_spec_ = 0;
  std::priority_queue<Step> steps_;
  // Noise for each byte of the first step that does not fit, if any; the choice
  // until then, and the bytes that it leaves.
  double price_ = -1;
  std::vector<int> bases_;
  absl::int128 bases_left_ = 0;
  std::priority_queue<Saving> savings_;
  // Of choice_, as far as it is summed.
  double noise_ = 0;
  std::unique_ptr<MixtureSearch> search_;
  // The best so far, and its noise.
  Mixture mixture_;
  double best_noise_ = 0;
};

// The smallest option of each tensor whose noise is at most that of
// `min_sqnr_db`; the one with the least noise where there is none, and then the
// target is not met. At equal size the less noise, then the smaller spec_index.
Mixture SmallestMixture(absl::Span<const TensorOptions> tensors,
                        double min_sqnr_db);

// The least sum of noise_to_signal with at most `max_size_bytes` in all, or
// nearly. It is never above that of any one spec for all tensors that fits, nor
// more than one tensor's step above the optimum; it is the optimum, to
// rounding, unless MixtureSearch, which is what looks for it, meets its bounds.
// The start is Lagrangian relaxation on the lower convex hull of each tensor's
// options, and the one spec; what either leaves is filled greedily. The
// smallest options where even they are too large, and then the target is not
// met.
//
// Noise that is not finite counts as 1e200.
Mixture BestMixture(absl::Span<const TensorOptions> tensors,
                    int64_t max_size_bytes);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_
