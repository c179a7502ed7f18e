// Statistics that a store keeps in pieces.

#ifndef QUANTD_TESTS_SERVER_STORE_LARGE_STATE_H_
#define QUANTD_TESTS_SERVER_STORE_LARGE_STATE_H_

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "core/formats/number_format.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"

namespace quantd::testing {

// Of a scale index per channel, with so many bins that it takes some pieces.
inline core::StatisticsState MakeLargeState(uint32_t seed) {
  constexpr int kChannels = 24;
  constexpr int kElements = 4000;
  std::mt19937 random(seed);
  std::lognormal_distribution<float> distribution(0, 3);
  std::vector<float> elements(kChannels * kElements);
  for (float& element : elements) element = distribution(random);
  core::StatisticsState state;
  state.shape = {kChannels, kElements};
  state.block_size = {1, 0};
  const auto layout = core::BlockLayout::Create(state.shape, state.block_size);
  state.statistics = core::TensorStatistics(kChannels, 10);
  state.statistics.Update(*layout, core::ElementType::kFloat32, 0,
                          static_cast<int64_t>(elements.size()),
                          reinterpret_cast<const uint8_t*>(elements.data()),
                          nullptr);
  return state;
}

// A row of ones and the sums of its products; of 1,100 features and more, those
// are more than a transaction writes.
inline core::StatisticsState MakeStateWithGram(int64_t features) {
  const std::vector<float> row(static_cast<size_t>(features), 1);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(row.data());
  const auto layout = core::BlockLayout::Create({1, features}, {});
  core::StatisticsState state;
  state.shape = {1, features};
  state.statistics = core::TensorStatistics(1, 7);
  state.statistics.Update(*layout, core::ElementType::kFloat32, 0, features,
                          bytes, nullptr);
  core::GramState gram = *core::GramState::Create(
      std::vector<int>(row.size(), -10), core::GramState::PartSize(features));
  gram.Update(core::ElementType::kFloat32, 1, bytes, nullptr);
  gram.Finish(nullptr);
  state.gram = std::move(gram);
  return state;
}

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SERVER_STORE_LARGE_STATE_H_
