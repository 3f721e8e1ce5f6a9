// Waiting for the call lock, which Ctrl-C and the end of the world interrupt.
#include "call_lock.h"

#include <chrono>
#include <cstring>
#include <string>

#include "process.h"

namespace tfring {
namespace {

constexpr std::chrono::milliseconds kSlice(100);  // between checks for Ctrl-C

}  // namespace

// A signal handler that runs inside a collective may call another on the thread that holds the call lock.
Status CallLock::take(Claim* claim) {
  if (is_this_threads()) {
    return {Code::kInvalid, std::string("\"") + claim->call.name +
                                "\" was called from within a collective of ring \"" + settings_.name +
                                "\", by a signal handler or a destructor"};
  }
  std::unique_lock<std::mutex> lock(mutex_);
  add(claim);
  Status status = contended(*claim);
  if (status.ok()) status = wait_for_lock(claim->call, &lock);
  if (status.ok()) status = contended(*claim);
  if (!status.ok()) return status;
  is_taken_ = claim->is_held_ = true;
  owner_ = std::this_thread::get_id();
  return {};
}

Status CallLock::wait_for_lock(const tfring_call& call, std::unique_lock<std::mutex>* lock) {
  while (is_taken_ && !wake_event_.is_closing()) {
    changed_.wait_for(*lock, kSlice);
    if (!is_taken_ || call.caller == TFRING_ANY_THREAD) continue;
    lock->unlock();  // a handler may close this world
    const bool interrupted =
        call.caller == TFRING_PYTHON_MAIN_THREAD ? python_interrupted() : op_interrupted();
    lock->lock();
    if (interrupted)
      return {Code::kInterrupted, "interrupted while another thread used ring \"" + settings_.name + "\"",
              Reason::kInterrupted, settings_.rank};
  }
  if (wake_event_.is_closing()) return {Code::kInvalid, "this communicator is closed"};
  return {};
}

Status CallLock::settle(Claim* claim) {
  std::lock_guard<std::mutex> lock(mutex_);
  remove(claim);
  return contended(*claim);
}

void CallLock::leave(Claim* claim) {
  if (claim->is_held_) owner_ = std::thread::id();
  std::lock_guard<std::mutex> lock(mutex_);
  remove(claim);
  if (!claim->is_held_) return;
  is_taken_ = false;
  changed_.notify_all();
}

// Adds a claim, and marks it and all others of the same call.
void CallLock::add(Claim* claim) {
  for (Claim* other = claims_; other != nullptr; other = other->next_) {
    if (claim->group == nullptr || claim->group->size() == 1 || claim->group != other->group) continue;
    if (std::strcmp(claim->call.name, other->call.name) != 0) continue;
    claim->is_contended_ = other->is_contended_ = true;
  }
  claim->next_ = claims_;
  claims_ = claim;
  claim->is_listed_ = true;
}

void CallLock::remove(Claim* claim) {
  if (!claim->is_listed_) return;
  Claim** link = &claims_;
  while (*link != claim) link = &(*link)->next_;
  *link = claim->next_;
  claim->is_listed_ = false;
}

Status CallLock::contended(const Claim& claim) const {
  if (!claim.is_contended_) return {};
  return {Code::kMismatch,
          "two threads of rank " + std::to_string(settings_.rank) + " called \"" + claim.call.name +
              "\" of ring \"" + claim.group->name +
              "\" at the same time, so ranks cannot match their calls. " +
              "Call it from one thread (in a Dataset.map without num_parallel_calls), or give each " +
              "thread its own communicator",
          Reason::kThreads, settings_.rank};
}

std::unique_lock<std::mutex> CallLock::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.notify_all();  // waiting threads notice that the world closes
  changed_.wait(lock, [this] { return !is_taken_; });
  return lock;
}

}  // namespace tfring
