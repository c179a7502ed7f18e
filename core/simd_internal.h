// The part of the choice in cpu.h that the kernels need to know.

#ifndef QUANTD_CORE_SIMD_INTERNAL_H_
#define QUANTD_CORE_SIMD_INTERNAL_H_

namespace quantd::core::internal {

// The kernels are to run their scalar definitions.
bool UsesScalarKernels();

}  // namespace quantd::core::internal

#endif  // QUANTD_CORE_SIMD_INTERNAL_H_
