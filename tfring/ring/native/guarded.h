// A lock and the value that it protects.
#pragma once

#include <mutex>
#include <utility>

namespace tfring {

// A value that is accessible only with its lock held.
template <typename T>
class Guarded {
 public:
  // Holds the lock during its lifetime.
  class Locked {
   public:
    Locked(std::mutex& mutex, T* value) : lock_(mutex), value_(value) {}
    T* operator->() const { return value_; }
    T& operator*() const { return *value_; }

   private:
    const std::lock_guard<std::mutex> lock_;
    T* const value_;
  };

  template <typename... Arguments>
  explicit Guarded(Arguments&&... arguments) : value_(std::forward<Arguments>(arguments)...) {}
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  Locked lock() { return Locked(mutex_, &value_); }

 private:
  std::mutex mutex_;
  T value_;
};

}  // namespace tfring
