#include "core/evaluate/comparison.h"

#include <cstdint>

namespace quantd::core {

Comparison::Comparison(ElementType type, bool with_distribution)
    : type_(type), reference_(1) {}

void Comparison::Update(int64_t first, int64_t count, const uint8_t* data,
                        ThreadPool* pool) {}

ErrorDistribution Comparison::distribution() const { return {}; }

}  // namespace quantd::core
