// Waiting while no bytes move: polls, then sleeps.
#include "wait.h"

#include <sched.h>

#include <algorithm>

#include "clock.h"
#include "process.h"

namespace tfring {
namespace {

constexpr int kSliceMilliseconds = 100;  // between checks for close() and Ctrl-C
constexpr double kSliceSeconds = 0.1;
constexpr double kLastWordsSeconds = 0.5;  // for a control connection to report why a data connection closed
constexpr double kStepSeconds = 2;         // for a step that fails on all ranks to fail on each of them

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Waiting::Waiting(const Settings& settings, const Call& call, const Plan& plan, const Links& links,
                 Guarded<Liveness>* liveness, WakeEvent* wake_event, double* seconds_waited)
    : settings_(settings),
      call_(call),
      plan_(plan),
      links_(links),
      liveness_(*liveness),
      wake_event_(*wake_event),
      seconds_waited_(*seconds_waited),
      inspector_(settings, call, plan, liveness) {}

Status Waiting::wait() {
  if (++num_idle_ <= spins_) {
    relax();
    return {};
  }
  if (num_idle_ <= spins_ + yields_) {
    sched_yield();
    return {};
  }
  const int64_t start = now_nanoseconds();
  if (num_idle_ == spins_ + yields_ + 1) idle_since_ = start;
  TFRING_TRY(liveness_.lock()->check_left());
  const double idle_seconds = seconds_between(idle_since_, start);
  if (idle_seconds > kLastWordsSeconds) TFRING_TRY(liveness_.lock()->adopt_peer_failure());
  if (idle_seconds > kStepSeconds) TFRING_TRY(check_step());
  TFRING_TRY(inspector_.inspect(start, idle_since_, timeout_seconds_));
  const double until_timeout = std::max(timeout_seconds_ - idle_seconds, 0.01);
  sleep(static_cast<int>(std::min<double>(kSliceMilliseconds, until_timeout * 1e3)) + 1);
  const int64_t end = now_nanoseconds();
  seconds_waited_ += seconds_between(start, end);
  return look_up(end);
}

// Sleeps until bytes may move, it is woken, or the time is over.
void Waiting::sleep(int milliseconds) {
  poll_fds_.assign(1, {wake_event_.fd(), POLLIN, 0});
  for (const Queue& queue : plan_.queues) {
    const Link& link = *links_.to(queue.rank);
    const bool wants_room =
        queue.send >= 0 && (queue.header_sent < kHeaderBytes || plan_.sendable(queue) > 0);
    const bool wants_data = plan_.may_receive(queue);
    if (!wants_room && !wants_data) continue;
    if (link.own == nullptr) {
      const int events = (wants_room ? POLLOUT : 0) | (wants_data ? POLLIN : 0);
      poll_fds_.push_back({link.data_fd.get(), static_cast<short>(events), 0});
      continue;
    }
    poll_fds_.push_back({link.own->doorbell_fd(), POLLIN, 0});
    link.own->fall_asleep();
    if ((wants_room && link.sender->ready()) ||
        (wants_data && link.receiver->ready(plan_.least_receivable(queue))))
      milliseconds = 0;
  }
  if (milliseconds > 0) poll(poll_fds_.data(), poll_fds_.size(), milliseconds);
  for (const Queue& queue : plan_.queues) {
    Mailbox* own = links_.to(queue.rank)->own.get();
    if (own != nullptr) own->wake_up();
  }
  for (const pollfd& fd : poll_fds_) {  // silence doorbells that rang, and the event
    if ((fd.revents & POLLIN) == 0) continue;
    if (fd.fd == wake_event_.fd()) wake_event_.silence();
    for (const Queue& queue : plan_.queues) {
      Mailbox* own = links_.to(queue.rank)->own.get();
      if (own != nullptr && own->doorbell_fd() == fd.fd) own->silence_doorbell();
    }
  }
}

Status Waiting::look_up(int64_t now) {
  if (seconds_between(looked_up_, now) < kSliceSeconds && !wake_event_.is_closing()) return {};
  looked_up_ = now;
  if (wake_event_.is_closing()) {
    return liveness_.lock()->break_up(
        {Code::kPeerLost, "rank " + std::to_string(settings_.rank) + " closed the ring during " + here(),
         Reason::kClosed, settings_.rank});
  }
  if (call_.caller == TFRING_PYTHON_MAIN_THREAD && python_interrupted()) return interrupt();
  if (call_.caller == TFRING_TENSORFLOW_OP && op_interrupted()) return interrupt();
  return {};
}

Status Waiting::look_up_at_once() {
  looked_up_ = 0;
  return look_up(now_nanoseconds());
}

Status Waiting::interrupt() {
  return liveness_.lock()->interrupt(
      {Code::kPeerLost, "rank " + std::to_string(settings_.rank) + " was interrupted during " + here(),
       Reason::kInterrupted, settings_.rank});
}

// Breaks the ring once the step of this call is cancelled: TensorFlow waits for the call before it reports
// the operation that failed. Ranks on which the same operation fails may still finish the call, so this
// is called only after a standstill of some time.
Status Waiting::check_step() {
  if (call_.caller != TFRING_TENSORFLOW_OP || !op_cancelled()) return {};
  return liveness_.lock()->break_up({Code::kPeerLost,
                                     "rank " + std::to_string(settings_.rank) + " gave up in " + here() +
                                         ": another operation of its step failed, as its own error shows",
                                     Reason::kStepFailed, settings_.rank});
}

// The control connection reports why the data connection closed. If it does not, the peer died.
Status Waiting::peer_gone(int rank) {
  const int64_t start = now_nanoseconds();
  do {
    TFRING_TRY(liveness_.lock()->check_left());
    wake_event_.sleep(kSliceMilliseconds);
  } while (seconds_between(start, now_nanoseconds()) < kLastWordsSeconds);
  return liveness_.lock()->lose_dead(rank);
}

}  // namespace tfring
