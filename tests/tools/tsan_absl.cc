// Tells ThreadSanitizer of Abseil's locks. Preloaded into the tests of the tsan
// build: the distribution's Abseil was built without the sanitizer, so that its
// locks order nothing in the sanitizer's eyes.

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

// Weak: ctest and python, which start the tests, run without the sanitizer.
extern "C" {
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
__attribute__((weak)) void AnnotateIgnoreReadsBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreReadsEnd(const char* file, int line);
}

namespace {

// The library's definition of a method that this file defines before it.
template <typename Method>
Method LibrarysOwn(Method ours) {
  // The Itanium ABI keeps a method's address in the first word.
  void* address;
  std::memcpy(&address, &ours, sizeof(address));
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_sname == nullptr) std::abort();
  void* const next = dlsym(RTLD_NEXT, info.dli_sname);
  if (next == nullptr) std::abort();
  std::memcpy(&ours, &next, sizeof(next));
  return ours;
}

template <auto kOurs, typename Object, typename... Arguments>
auto Call(Object* object, const Arguments&... arguments) {
  static const auto next = LibrarysOwn(kOurs);
  return (object->*next)(arguments...);
}

void Acquire(const void* object) {
  if (__tsan_acquire) __tsan_acquire(const_cast<void*>(object));
}
void Release(const void* object) {
  if (__tsan_release) __tsan_release(const_cast<void*>(object));
}

// A thread that unlocks evaluates the conditions of those that wait, with the
// lock still held but after Release().
class IgnoreReads {
 public:
  IgnoreReads() {
    if (AnnotateIgnoreReadsBegin) AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  }
  ~IgnoreReads() {
    if (AnnotateIgnoreReadsEnd) AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};

template <auto kOurs, typename Object>
void CallUnlock(Object* object) {
  Release(object);
  const IgnoreReads ignore;
  Call<kOurs>(object);
}

// For what unlocks and locks again.
template <auto kOurs, typename Object, typename... Arguments>
auto CallWait(Object* object, const void* lock, const Arguments&... arguments) {
  struct Relock {
    explicit Relock(const void* lock) : lock(lock) { Release(lock); }
    ~Relock() { Acquire(lock); }
    const void* const lock;
  };
  const Relock relock(lock);
  const IgnoreReads ignore;
  return Call<kOurs>(object, arguments...);
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  Call<&Mutex::Lock>(this);
  Acquire(this);
}

bool Mutex::TryLock() {
  const bool locked = Call<&Mutex::TryLock>(this);
  if (locked) Acquire(this);
  return locked;
}

void Mutex::Unlock() { CallUnlock<&Mutex::Unlock>(this); }

void Mutex::ReaderLock() {
  Call<&Mutex::ReaderLock>(this);
  Acquire(this);
}

void Mutex::ReaderUnlock() { CallUnlock<&Mutex::ReaderUnlock>(this); }

void Mutex::LockWhen(const Condition& condition) {
  CallWait<&Mutex::LockWhen>(this, this, condition);
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  return CallWait<&Mutex::LockWhenWithTimeout>(this, this, condition, timeout);
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  return CallWait<&Mutex::LockWhenWithDeadline>(this, this, condition,
                                                deadline);
}

void Mutex::Await(const Condition& condition) {
  CallWait<&Mutex::Await>(this, this, condition);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  return CallWait<&Mutex::AwaitWithTimeout>(this, this, condition, timeout);
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  return CallWait<&Mutex::AwaitWithDeadline>(this, this, condition, deadline);
}

void CondVar::Wait(Mutex* mutex) {
  CallWait<&CondVar::Wait>(this, mutex, mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  return CallWait<&CondVar::WaitWithTimeout>(this, mutex, mutex, timeout);
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  return CallWait<&CondVar::WaitWithDeadline>(this, mutex, mutex, deadline);
}

void Notification::Notify() {
  Release(this);
  // HasBeenNotified() is inline: its atomic load acquires at the flag, which
  // follows the lock.
  Release(reinterpret_cast<const char*>(this) + sizeof(Mutex));
  Call<&Notification::Notify>(this);
}

void Notification::WaitForNotification() const {
  Call<&Notification::WaitForNotification>(this);
  Acquire(this);
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  const bool notified =
      Call<&Notification::WaitForNotificationWithTimeout>(this, timeout);
  if (notified) Acquire(this);
  return notified;
}

bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  const bool notified =
      Call<&Notification::WaitForNotificationWithDeadline>(this, deadline);
  if (notified) Acquire(this);
  return notified;
}

bool BlockingCounter::DecrementCount() {
  Release(this);
  return Call<&BlockingCounter::DecrementCount>(this);
}

void BlockingCounter::Wait() {
  Call<&BlockingCounter::Wait>(this);
  Acquire(this);
}

ABSL_NAMESPACE_END
}  // namespace absl
