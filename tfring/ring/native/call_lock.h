// The lock of calls.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "core.h"
#include "group.h"
#include "settings.h"
#include "status.h"
#include "wake_event.h"

namespace tfring {

// Allows one call at a time in a world, of any group.
class CallLock {
 public:
  // A call that holds the lock or waits for it, on the stack of its thread. It ends and releases the lock at
  // the end of its scope.
  class Claim {
   public:
    // `group` is null if the order of calls does not matter.
    Claim(CallLock* lock, const tfring_call& call_in, const Group* group_in)
        : call(call_in), group(group_in), call_lock_(*lock) {}
    ~Claim() { call_lock_.leave(this); }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

    // Waits until no other thread holds the call lock. Fails with kMismatch if another thread has claimed the
    // same call of the same group, because other ranks cannot know the order of two threads.
    Status take() { return call_lock_.take(this); }
    // Ends the claim of the thread that holds the call lock. Fails with kMismatch if another thread claimed
    // the same call in the meantime: the result may belong to either.
    Status settle() { return call_lock_.settle(this); }

    const tfring_call& call;
    const Group* const group;

   private:
    friend class CallLock;
    CallLock& call_lock_;
    bool is_listed_ = false;
    bool is_held_ = false;
    bool is_contended_ = false;
    Claim* next_ = nullptr;
  };

  CallLock(const Settings& settings, const WakeEvent& wake_event)
      : settings_(settings), wake_event_(wake_event) {}

  bool is_this_threads() const { return owner_ == std::this_thread::get_id(); }
  // Returns once no thread has it. No thread takes it as long as the returned lock is held.
  std::unique_lock<std::mutex> wait();

 private:
  Status take(Claim* claim);
  Status settle(Claim* claim);
  void leave(Claim* claim);
  Status wait_for_lock(const tfring_call& call, std::unique_lock<std::mutex>* lock);
  void add(Claim* claim);
  void remove(Claim* claim);
  Status contended(const Claim& claim) const;

  const Settings& settings_;
  const WakeEvent& wake_event_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_taken_ = false;
  Claim* claims_ = nullptr;  // of threads that hold the lock or wait for it
  std::atomic<std::thread::id> owner_{};
};

}  // namespace tfring
