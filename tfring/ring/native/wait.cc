// What happens when no bytes move: sleep, and notice who is gone, stopped or of another mind.
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "clock.h"
#include "ring.h"

namespace tfring {
namespace {

constexpr int kSliceMilliseconds = 100;  // between looks at close() and at Python's signals
constexpr int kLastWordsMilliseconds = 500;

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

std::string Ring::here() const {
  return describe(header_) + ", collective " + std::to_string(sequence_) + " of ring \"" + name_ + "\"";
}

Status Ring::wait() {
  if (++num_idle_ <= num_spins_) {
    relax();
    return {};
  }
  const int64_t start = now_nanoseconds();
  if (num_idle_ == num_spins_ + 1) idle_since_ = start;
  const double idle_seconds = seconds_between(idle_since_, start);
  if (idle_seconds > timeout_seconds_) TFRING_TRY(suspect(idle_seconds));
  TFRING_TRY(check_left());
  const double until_timeout = std::max(timeout_seconds_ - idle_seconds, 0.01);
  const Status status =
      sleep(static_cast<int>(std::min<double>(kSliceMilliseconds, until_timeout * 1e3)) + 1);
  statistics_.seconds_waited += seconds_between(start, now_nanoseconds());
  return status;
}

// Until something may move, a neighbour says something, or the time is over.
Status Ring::sleep(int milliseconds) {
  const bool wants_room = header_sent_ < static_cast<int64_t>(sizeof(header_)) || sendable() > 0;
  const bool wants_data = may_receive();
  pollfd fds[5] = {};
  nfds_t num_fds = 0;
  for (const Control& control : controls_) {
    // A neighbour that said goodbye closes its end: nothing to wake up for.
    fds[num_fds++] = {control.left ? -1 : control.fd, POLLIN, 0};
  }
  if (wants_room && sender_->poll_fd() >= 0) fds[num_fds++] = {sender_->poll_fd(), POLLOUT, 0};
  if (wants_data && receiver_->poll_fd() >= 0) fds[num_fds++] = {receiver_->poll_fd(), POLLIN, 0};
  const nfds_t doorbell = num_fds;
  if (own_mailbox_ != nullptr) {
    fds[num_fds++] = {own_mailbox_->doorbell_fd(), POLLIN, 0};
    own_mailbox_->fall_asleep();
    if ((wants_room && sender_->ready()) || (wants_data && receiver_->ready(least_receivable())))
      milliseconds = 0;
  }
  const int ready = milliseconds == 0 ? 0 : poll(fds, num_fds, milliseconds);
  if (own_mailbox_ != nullptr) {
    own_mailbox_->wake_up();
    if (fds[doorbell].revents != 0) own_mailbox_->silence_doorbell();
  }
  if (closing_)
    return fail(Code::kPeerLost, "rank " + std::to_string(rank_) + " closed the ring during " + here());
  if (ready <= 0 && check_signals_ && python_interrupted()) {
    const Status status =
        fail(Code::kPeerLost, "rank " + std::to_string(rank_) + " was interrupted during " + here());
    return {Code::kInterrupted, status.message};
  }
  for (Side side : {kPrevious, kNext}) {
    if (fds[side].revents != 0) TFRING_TRY(read_control(side));
  }
  return {};
}

// Nothing has moved for timeout_seconds. A neighbour that waits in this collective like us answers a ping:
// then somebody further on stands still, and the rank next to that one will say so.
Status Ring::suspect(double idle_seconds) {
  if (!suspecting_) {
    suspecting_ = true;
    for (Side side : {kPrevious, kNext}) {
      controls_[side].answered = false;
      send_control(side, make_control(ControlType::kPing, rank_, sequence_));
    }
    return {};
  }
  const double grace = std::min(std::max(0.1 * timeout_seconds_, 0.25), 5.0);
  const double over = idle_seconds - timeout_seconds_;
  const Control& needed = controls_[may_receive() ? kPrevious : kNext];
  if (over < (needed.answered ? 10 * grace : grace)) return {};
  const std::string who = "rank " + std::to_string(needed.rank);
  const std::string what = needed.answered ? who + " waits as well, and no rank says for whom"
                                           : who + " takes no part: it is stopped, or busy elsewhere";
  return fail(Code::kTimeout, "nothing moved for " + seconds_text(timeout_seconds_) + " at rank " +
                                  std::to_string(rank_) + " in " + here() + ": " + what);
}

// A neighbour that left after finishing this collective has sent all it had to and needs nothing more.
Status Ring::check_left() {
  for (const Control& control : controls_) {
    if (!control.left || control.left_finished > sequence_) continue;
    if (!pending_abort_.ok()) return broken_ = pending_abort_;
    return fail(Code::kPeerLost, "rank " + std::to_string(control.rank) +
                                     " left the ring (its script ended?) while rank " +
                                     std::to_string(rank_) + " called " + here());
  }
  return {};
}

Status Ring::read_control(Side side) {
  Control& control = controls_[side];
  while (!control.left) {
    char* to = reinterpret_cast<char*>(&control.frame) + control.fill;
    const ssize_t got = recv(control.fd, to, sizeof(control.frame) - control.fill, MSG_DONTWAIT);
    if (got < 0 && would_block(errno)) return {};
    if (got <= 0) return died(side);
    control.fill += static_cast<size_t>(got);
    if (control.fill < sizeof(control.frame)) continue;
    control.fill = 0;
    TFRING_TRY(take_control(side));
  }
  return {};
}

Status Ring::take_control(Side side) {
  Control& control = controls_[side];
  const ControlFrame& frame = control.frame;
  if (frame.magic != kControlMagic || frame.version != kProtocolVersion) {
    return fail(Code::kInternal,
                "rank " + std::to_string(control.rank) + " sent a control frame that is none");
  }
  switch (static_cast<ControlType>(frame.type)) {
    case ControlType::kAbort: {
      send_control(side == kPrevious ? kNext : kPrevious, frame);
      const Status status(static_cast<Code>(frame.code),
                          std::string(frame.message, strnlen(frame.message, sizeof(frame.message))));
      if (frame.sequence > sequence_) {
        if (pending_abort_.ok()) pending_abort_ = status;
        return {};
      }
      return broken_ = status;
    }
    case ControlType::kGoodbye:
      control.left = true;
      control.left_finished = frame.sequence;
      return {};
    case ControlType::kPing:
      send_control(side, make_control(ControlType::kPong, rank_, sequence_));
      return {};
    case ControlType::kPong:
      control.answered = true;
      return {};
  }
  return {};
}

// There is room: a rank writes a handful of control frames in its life.
void Ring::send_control(Side side, const ControlFrame& frame) {
  if (controls_[side].fd < 0) return;
  const ssize_t sent = send(controls_[side].fd, &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT);
  (void)sent;  // a neighbour that is gone needs no telling
}

// The data connection closed. Why, stands in the control connection; nothing there: the neighbour died.
Status Ring::neighbour_gone(Side side) {
  Control& control = controls_[side];
  const int64_t start = now_nanoseconds();
  while (!control.left && seconds_between(start, now_nanoseconds()) * 1e3 < kLastWordsMilliseconds) {
    pollfd fd{control.fd, POLLIN, 0};
    poll(&fd, 1, kLastWordsMilliseconds);
    TFRING_TRY(read_control(side));
  }
  TFRING_TRY(check_left());
  return died(side);
}

Status Ring::died(Side side) {
  if (!pending_abort_.ok()) return broken_ = pending_abort_;
  return fail(Code::kPeerLost, "rank " + std::to_string(controls_[side].rank) +
                                   " died: its connection to rank " + std::to_string(rank_) +
                                   " closed during " + here());
}

// Breaks the ring here and, through the neighbours, everywhere.
Status Ring::fail(Code code, const std::string& message) {
  if (!broken_.ok()) return broken_;
  broken_ = Status(code, message);
  const ControlFrame frame = make_control(ControlType::kAbort, rank_, sequence_, code, message);
  send_control(kPrevious, frame);
  send_control(kNext, frame);
  return broken_;
}

}  // namespace tfring
