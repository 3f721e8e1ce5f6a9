// What happens when no bytes move: sleep, and ask why.
#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "clock.h"
#include "process.h"
#include "ring.h"

namespace tfring {
namespace {

constexpr int kSliceMilliseconds = 100;  // between looks at close() and at Ctrl-C
constexpr double kSliceSeconds = 0.1;
constexpr double kAskSeconds = 1.0;  // between questions to the neighbours
constexpr double kLastWordsSeconds =
    0.5;  // in which a neighbour's control connection tells why the other closed

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Status Ring::wait() {
  if (++num_idle_ <= num_spins_) {
    relax();
    return {};
  }
  const int64_t start = now_nanoseconds();
  if (num_idle_ == num_spins_ + 1) idle_since_ = start;
  TFRING_TRY(check_news());
  const double idle_seconds = seconds_between(idle_since_, start);
  TFRING_TRY(ask_why(start, idle_seconds));
  const double until_timeout = std::max(timeout_seconds_ - idle_seconds, 0.01);
  sleep(static_cast<int>(std::min<double>(kSliceMilliseconds, until_timeout * 1e3)) + 1);
  const int64_t end = now_nanoseconds();
  statistics_.seconds_waited += seconds_between(start, end);
  return look_up(end);
}

// Until something may move, there is news, or the time is over.
void Ring::sleep(int milliseconds) {
  const bool wants_room = header_sent_ < static_cast<int64_t>(sizeof(header_)) || sendable() > 0;
  const bool wants_data = may_receive();
  pollfd fds[4] = {{news_fd_.get(), POLLIN, 0}};
  nfds_t num_fds = 1;
  if (wants_room && sender_->poll_fd() >= 0) fds[num_fds++] = {sender_->poll_fd(), POLLOUT, 0};
  if (wants_data && receiver_->poll_fd() >= 0) fds[num_fds++] = {receiver_->poll_fd(), POLLIN, 0};
  const nfds_t doorbell = num_fds;
  if (own_mailbox_ != nullptr) {
    fds[num_fds++] = {own_mailbox_->doorbell_fd(), POLLIN, 0};
    own_mailbox_->fall_asleep();
    if ((wants_room && sender_->ready()) || (wants_data && receiver_->ready(least_receivable())))
      milliseconds = 0;
  }
  if (milliseconds > 0) poll(fds, num_fds, milliseconds);
  if (own_mailbox_ != nullptr) {
    own_mailbox_->wake_up();
    if (fds[doorbell].revents != 0) own_mailbox_->silence_doorbell();
  }
  if (fds[0].revents != 0) {
    uint64_t count;
    const ssize_t got = read(news_fd_.get(), &count, sizeof(count));
    (void)got;
  }
}

// Ten times a second, whether bytes move or not.
Status Ring::look_up(int64_t now) {
  if (seconds_between(looked_up_, now) < kSliceSeconds && !closing_) return {};
  looked_up_ = now;
  if (closing_) {
    return fail(Code::kPeerLost, "rank " + std::to_string(rank_) + " closed the ring during " + here());
  }
  if (caller_ == TFRING_PYTHON_MAIN_THREAD && python_interrupted()) return interruption();
  if (caller_ == TFRING_TENSORFLOW_OP && op_interrupted()) return interruption();
  return {};
}

Status Ring::interruption() {
  const Status status =
      fail(Code::kPeerLost, "rank " + std::to_string(rank_) + " was interrupted during " + here());
  interrupted_ = true;
  return {Code::kInterrupted, status.message};
}

// What neighbours have told. One that left after finishing this collective has sent all it had to and needs
// nothing more.
Status Ring::check_news() {
  std::lock_guard<std::mutex> lock(control_mutex_);
  if (fails_from_ <= sequence_) return failure_;
  for (const Control& control : controls_) {
    if (!control.left || control.left_finished > sequence_) continue;
    return fail_from(sequence_, {Code::kPeerLost, "rank " + std::to_string(control.rank) +
                                                      " left the ring (its script ended?) while rank " +
                                                      std::to_string(rank_) + " called " + here()});
  }
  return {};
}

void Ring::stand_still(bool stands) {
  if (stands == stands_still_) return;
  stands_still_ = stands;
  stands ? stands_still(identity_) : moves_again(identity_);
}

// Nothing moves. The neighbour this rank waits for (the previous one, or the next if only room is wanting)
// says whether it is in a collective: if so, it waits like this rank, and the rank next to the one that
// stands still will see to it. A neighbour that answers nothing is the watcher's affair (liveness.cc).
Status Ring::ask_why(int64_t now, double idle_seconds) {
  const double period = std::min({kAskSeconds, timeout_seconds_ / 4, stall_seconds_ / 4});
  if (idle_seconds < period) return {};
  stand_still(on_pool_thread_);
  std::lock_guard<std::mutex> lock(control_mutex_);
  for (Side side : {kPrevious, kNext}) ask(side, now, period);
  const Control& needed = controls_[may_receive() ? kPrevious : kNext];
  const std::string who = "rank " + std::to_string(needed.rank);
  const double age = seconds_between(needed.answered, now);  // of what it has told
  const bool answers = needed.answered > idle_since_ && age < 2 * period + kSliceSeconds;
  const bool takes_part = answers && (needed.begun > sequence_ || needed.pong.in_collective != 0);
  const bool absent = answers && !takes_part;

  if (absent && on_pool_thread_ && age < period && wait_for_each_other(needed.pong)) {
    return fail_from(
        sequence_, {Code::kMismatch,
                    "rank " + std::to_string(rank_) + " and " + who +
                        " wait for each other in different rings: all inter-op threads of rank " +
                        std::to_string(rank_) + " wait, one of them in " + here() + ", those of " + who +
                        " in others (" + needed.pong.last_call +
                        " is its last call of this ring). Run the rings' collectives in one order: from one "
                        "tf.function, or from one Python thread; or give TensorFlow a thread for each: "
                        "tf.config.threading.set_inter_op_parallelism_threads(n)"});
  }
  if (absent && may_receive() && !warned_ && idle_seconds > stall_seconds_) {
    warned_ = true;
    warn(name_of_peer(needed) + " is slow: all ranks have waited for it for " + seconds_text(idle_seconds) +
         " in " + here() + ". It is alive, and the last it called in this ring is " + needed.pong.last_call +
         ". They go on waiting, up to " + seconds_text(timeout_seconds_) + " (TFRING_TIMEOUT_SECONDS).");
  }
  const double grace = std::min(std::max(0.1 * timeout_seconds_, 0.25), 5.0);
  const double over = idle_seconds - timeout_seconds_;
  if (over < (takes_part ? 10 * grace : grace)) return {};
  const std::string why = takes_part ? who + " waits as well, and no rank says for whom"
                          : absent
                              ? who + " takes no part: its process on " + needed.host +
                                    " is alive but busy elsewhere; the last it called in this ring is " +
                                    needed.pong.last_call
                              : who + " takes no part: its process on " + needed.host + " answers nothing";
  return fail_from(sequence_,
                   {Code::kTimeout, "nothing moved for " + seconds_text(timeout_seconds_) + " at rank " +
                                        std::to_string(rank_) + " in " + here() + ": " + why});
}

// The data connection closed. Why, the control connection tells; if it tells nothing, the neighbour died.
Status Ring::neighbour_gone(Side side) {
  const int64_t start = now_nanoseconds();
  do {
    TFRING_TRY(check_news());
    sleep_for_news();
  } while (seconds_between(start, now_nanoseconds()) < kLastWordsSeconds);
  std::lock_guard<std::mutex> lock(control_mutex_);
  return lose(died(controls_[side]));
}

void Ring::sleep_for_news() {
  pollfd fd{news_fd_.get(), POLLIN, 0};
  poll(&fd, 1, kSliceMilliseconds);
  uint64_t count;
  const ssize_t got = read(news_fd_.get(), &count, sizeof(count));
  (void)got;
}

Status Ring::fail(Code code, const std::string& message) {
  std::lock_guard<std::mutex> lock(control_mutex_);
  return fail_from(sequence_, {code, message});
}

}  // namespace tfring
