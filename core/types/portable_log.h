// Logarithms with the same bits on every machine, which the C library's do not
// have.

#ifndef QUANTD_CORE_TYPES_PORTABLE_LOG_H_
#define QUANTD_CORE_TYPES_PORTABLE_LOG_H_

namespace quantd::core {

// The natural logarithm, good to some 2^-50.
// Requires: x > 0, finite.
double PortableLog(double x);

// 10 log10(signal / noise), in dB. Infinity where `noise` is 0; minus infinity
// where only `signal` is 0.
// Requires: neither is negative.
double Decibels(double signal, double noise);

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_PORTABLE_LOG_H_
