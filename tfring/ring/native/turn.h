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
  // A call that has the turn or waits for it; on the stack of its thread.
  struct Claim {
    const tfring_call& call;
    const Group* group;  // null where it does not matter which call comes first
    bool is_contended = false;
    Claim* next = nullptr;
  };

  Turn(const Settings& settings, const News& news) : settings_(settings), news_(news) {}

  // Waits until no other thread has it. Fails with kMismatch where another has claimed the same call of the
  // same group, for two threads have no order that other ranks could know.
  Status take(Claim* claim);
  // Ends the claim of the thread that has the turn, and fails with kMismatch where another thread claimed the
  // same call meanwhile: the result may be of either.
  Status settle(Claim* claim);
  void leave();
  bool is_this_threads() const { return owner_ == std::this_thread::get_id(); }
  // Returns once no thread has it; none takes it as long as the lock is held.
  std::unique_lock<std::mutex> wait();

 private:
  Status wait_for_turn(const tfring_call& call, std::unique_lock<std::mutex>* lock);
  void add(Claim* claim);
  void remove(const Claim* claim);
  Status contended(const Claim& claim) const;

  const Settings& settings_;
  const News& news_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_taken_ = false;
  Claim* claims_ = nullptr;  // of threads that have the turn or wait for it
  std::atomic<std::thread::id> owner_{};
};

}  // namespace tfring
