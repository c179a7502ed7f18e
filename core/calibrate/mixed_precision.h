// One spec for each tensor of a model.

#ifndef QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_
#define QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_

#include <cstddef>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/types/span.h"
#include "core/parallel/time_slice.h"

namespace quantd::core {

// What a spec would do to one tensor.
struct PrecisionOption {
  int spec_index;
  int64_t size_bytes;
  // sum e^2 / sum x^2.
  double noise_to_signal;
};

// The options of one tensor; at least one.
using TensorOptions = std::vector<PrecisionOption>;

struct Mixture {
  // [tensor count] index into the tensor's options.
  std::vector<int> choice;
  bool target_met = true;
};

// Chooses one in steps. Not thread-safe.
class MixtureChooser {
 public:
  // What it takes for a tensor at most, beside an int for each option.
  static constexpr int64_t kTensorBytes = 128;

  // As SmallestMixture and BestMixture, which say what is chosen. `tensors`
  // must outlive the chooser.
  static MixtureChooser Smallest(absl::Span<const TensorOptions> tensors,
                                 double min_sqnr_db);
  static MixtureChooser Best(absl::Span<const TensorOptions> tensors,
                             int64_t max_size_bytes);

  // Goes on until the slice is over, by one tensor at least; answers whether
  // all is chosen.
  bool Run(const TimeSlice& slice);
  // Once, after that.
  Mixture Take() { return std::move(mixture_); }

 private:
  enum class Stage { kSmallest, kHulls, kSteps, kLook, kFill, kDone };

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

  MixtureChooser(absl::Span<const TensorOptions> tensors, Stage stage)
      : tensors_(tensors), stage_(stage) {}

  // One tensor of a stage.
  void RunOne();
  void ChooseSmallest(const TensorOptions& options);
  void BeginHull(size_t tensor);
  void PushStep(size_t tensor, size_t next);
  void TakeStep();
  void LookAt(size_t tensor);
  void TakeSaving();
  int64_t MoreBytes(size_t tensor, int to) const;
  bool Fits(int64_t bytes) const { return bytes <= left_; }

  absl::Span<const TensorOptions> tensors_;
  Stage stage_;
  double min_sqnr_db_ = 0;
  // Bytes that are not spent.
  absl::int128 left_ = 0;
  // The tensor that comes next, where a stage takes them in order.
  size_t next_ = 0;
  std::vector<std::vector<int>> hulls_;
  std::priority_queue<Step> steps_;
  std::priority_queue<Saving> savings_;
  Mixture mixture_;
};

// The smallest option of each tensor whose noise is at most that of
// `min_sqnr_db`; the one with the least noise where there is none, and then the
// target is not met. At equal size the less noise, then the smaller spec_index.
Mixture SmallestMixture(absl::Span<const TensorOptions> tensors,
                        double min_sqnr_db);

// The least sum of noise_to_signal with at most `max_size_bytes` in all, by
// Lagrangian relaxation on the lower convex hull of each tensor's options and
// then a greedy fill of what is left: no more than one tensor's step above the
// optimum. The smallest options where even they are too large, and then the
// target is not met.
Mixture BestMixture(absl::Span<const TensorOptions> tensors,
                    int64_t max_size_bytes);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_
