// The turn of calls.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "core.h"
#include "group.h"
#include "news.h"
#include "settings.h"
#include "status.h"

namespace tfring {

// One call at a time, of any group of a world.
class Turn {
 public:
  Turn(const Settings& settings, const News& news) : settings_(settings), news_(news) {}

  // Waits until no other thread has it. Fails with kMismatch where that one is in the same call of the same
  // group, for two threads have no order that other ranks could know. `group` is null where it does not
  // matter which comes first.
  Status take(const tfring_call& call, const Group* group);
  void leave();
  bool is_this_threads() const { return owner_ == std::this_thread::get_id(); }
  // Returns once no thread has it; none takes it as long as the lock is held.
  std::unique_lock<std::mutex> wait();

 private:
  const Settings& settings_;
  const News& news_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_taken_ = false;
  const Group* group_ = nullptr;  // whose call it is,
  const char* name_ = "";         // and what that is called
  std::atomic<std::thread::id> owner_{};
};

}  // namespace tfring
