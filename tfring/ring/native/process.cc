// State of a process, shared by all its rings: Python's signals, warnings, TensorFlow's threads.
#include "process.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "clock.h"
#include "core.h"

namespace tfring {
namespace {

constexpr double kHearingSeconds = 0.2;  // for Python to learn of a signal, unless it waits inside TensorFlow
constexpr size_t kMostWarnings = 100;

tfring_python python{};
thread_local void* raised[3];
thread_local struct {
  int32_t (*is_cancelled)(void*);
  void* context;
} cancellation;

struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Warning> warnings;
  std::vector<std::pair<uint64_t, bool>> standing;  // rings, and whether on threads of TensorFlow's pool
  std::vector<std::pair<uint64_t, const RingState*>> rings;  // all rings of this process
  size_t pool_size = 0;                                      // 0: not known
  uint32_t asked = 0;  // number of the last interrupt Python was asked about
  int64_t asked_at = 0;
};
// Never destroyed: threads may still run while the process exits.
Shared* shared = new Shared;

std::atomic<uint32_t> interrupts{0};  // number of Ctrl-C so far
std::atomic<uint32_t> heard{0};       // number of which Python has learned
std::atomic<const struct sigaction*> pythons_action{nullptr};

// To be called with shared->mutex held.
bool all_threads_wait() {
  const auto on_pool = std::count_if(shared->standing.begin(), shared->standing.end(),
                                     [](const auto& one) { return one.second; });
  return shared->pool_size > 0 && static_cast<size_t>(on_pool) >= shared->pool_size;
}

const RingState* state_of(uint64_t ring) {
  for (const auto& joined : shared->rings) {
    if (joined.first == ring) return joined.second;
  }
  return nullptr;
}

// Returns whether the collective in which a peer waits has not begun here.
bool is_to_begin(uint64_t ring, uint64_t begun) {
  const RingState* state = state_of(ring);
  return state != nullptr && state->begun < begun;
}

void count_interrupt(int number, siginfo_t* info, void* context) {
  interrupts.fetch_add(1);
  const struct sigaction* next = pythons_action.load();
  if ((next->sa_flags & SA_SIGINFO) != 0) {
    next->sa_sigaction(number, info, context);
  } else {
    next->sa_handler(number);
  }
}

// Installs count_interrupt before the current handler, and again after another handler was set.
void count_interrupts() {
  struct sigaction action;
  if (sigaction(SIGINT, nullptr, &action) != 0 || action.sa_sigaction == count_interrupt) return;
  if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) return;
  std::lock_guard<std::mutex> lock(shared->mutex);
  pythons_action = new struct sigaction(action);  // not freed: a signal may still use the previous one
  action.sa_flags |= SA_SIGINFO;
  action.sa_sigaction = count_interrupt;
  sigaction(SIGINT, &action, nullptr);
}

// Python calls this between two steps of the main thread, after the handlers of pending signals.
int hear(void* number) {
  heard = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(number));
  return 0;
}

}  // namespace

bool python_interrupted() {
  if (python.err_check_signals == nullptr) return false;
  const int state = python.gil_state_ensure();
  const bool interrupted = python.err_check_signals() != 0;
  if (interrupted) python.err_fetch(&raised[0], &raised[1], &raised[2]);
  python.gil_state_release(state);
  return interrupted;
}

bool op_interrupted() {
  if (python.err_check_signals == nullptr) return false;
  count_interrupts();
  const uint32_t count = interrupts;
  if (count == heard) return false;
  {
    std::lock_guard<std::mutex> lock(shared->mutex);
    if (shared->asked != count) {
      shared->asked = count;
      shared->asked_at = now_nanoseconds();
      python.add_pending_call(hear, reinterpret_cast<void*>(static_cast<uintptr_t>(count)));
      return false;
    }
    if (seconds_between(shared->asked_at, now_nanoseconds()) < kHearingSeconds) return false;
  }
  if (python.interrupt_raises() != 0) return true;
  heard = count;  // a handler of the user, which runs after the op
  return false;
}

bool op_cancelled() {
  return cancellation.is_cancelled != nullptr && cancellation.is_cancelled(cancellation.context) != 0;
}

bool on_pool_thread() {
  return python.gil_state_get_this_thread_state != nullptr &&
         python.gil_state_get_this_thread_state() == nullptr;
}

void stands_still(uint64_t ring, bool on_pool_thread) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  shared->standing.emplace_back(ring, on_pool_thread);
}

void moves_again(uint64_t ring, bool on_pool_thread) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  const auto found =
      std::find(shared->standing.begin(), shared->standing.end(), std::make_pair(ring, on_pool_thread));
  if (found != shared->standing.end()) shared->standing.erase(found);
}

void notify_waiting(Pong* pong) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  if (shared->standing.size() > kMostWaiting) return;
  const bool only_pool = all_threads_wait();
  pong->all_threads_wait = only_pool ? 1 : 0;
  for (const auto& [ring, on_pool_thread] : shared->standing) {
    const RingState* state = state_of(ring);
    if (state == nullptr || (only_pool && !on_pool_thread)) continue;
    pong->waiting[pong->num_waiting++] = {ring, state->begun};
  }
}

void join_ring(uint64_t ring, const RingState* state) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  shared->rings.emplace_back(ring, state);
}

void leave_ring(const RingState* state) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  const auto found = std::find_if(shared->rings.begin(), shared->rings.end(),
                                  [&](const auto& joined) { return joined.second == state; });
  if (found != shared->rings.end()) shared->rings.erase(found);
}

std::string name_of_ring(uint64_t ring) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  const RingState* state = state_of(ring);
  return state == nullptr ? "" : state->name;
}

uint64_t waits_elsewhere(const Pong& peer) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  for (uint32_t i = 0; i < peer.num_waiting; ++i) {
    if (is_to_begin(peer.waiting[i].ring, peer.waiting[i].begun)) return peer.waiting[i].ring;
  }
  return 0;
}

bool wait_for_each_other(const Pong& peer) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  if (!all_threads_wait() || peer.all_threads_wait == 0 || peer.num_waiting == 0) return false;
  return std::all_of(peer.waiting, peer.waiting + peer.num_waiting,
                     [](const auto& theirs) { return is_to_begin(theirs.ring, theirs.begun); });
}

void warn(const std::string& line, bool with_stack) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  if (shared->warnings.size() < kMostWarnings) shared->warnings.push_back({line, with_stack});
  shared->changed.notify_one();
}

Warning next_warning() {
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->changed.wait(lock, [] { return !shared->warnings.empty(); });
  Warning warning = std::move(shared->warnings.front());
  shared->warnings.pop_front();
  return warning;
}

void forget_process_in_child() {
  const size_t pool_size = shared->pool_size;
  shared = new Shared;
  shared->pool_size = pool_size;
}

}  // namespace tfring

void tfring_use_python(const tfring_python* functions) { tfring::python = *functions; }

void tfring_raise_again(void) {
  if (tfring::raised[0] == nullptr) return;
  tfring::python.err_restore(tfring::raised[0], tfring::raised[1], tfring::raised[2]);
  tfring::raised[0] = nullptr;
}

void tfring_set_cancellation(int32_t (*is_cancelled)(void*), void* context) {
  tfring::cancellation = {is_cancelled, context};
}

void tfring_set_pool_size(int num_threads) {
  std::lock_guard<std::mutex> lock(tfring::shared->mutex);
  tfring::shared->pool_size = static_cast<size_t>(num_threads);
}
