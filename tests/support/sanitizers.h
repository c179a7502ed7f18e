// Whether a sanitizer slows the tests down.

#ifndef QUANTD_TESTS_SUPPORT_SANITIZERS_H_
#define QUANTD_TESTS_SUPPORT_SANITIZERS_H_

// g++ defines these by itself; clang has another way to say it.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__
#endif
#if __has_feature(thread_sanitizer) && !defined(__SANITIZE_THREAD__)
#define __SANITIZE_THREAD__
#endif
#endif

namespace quantd::testing {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitized = true;
#else
constexpr bool kThreadSanitized = false;
#endif

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = kThreadSanitized;
#endif

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_SANITIZERS_H_
