// Neighbours that leave, die, stop or are cut off, seen by the watcher's thread, in a collective or not.
//
//   slow     alive, and busy in Python, in a checkpoint, in a debugger: nobody's error before timeout_seconds
//   (wait.cc) stopped  its host acknowledges what it is sent, its process answers nothing cut off  not even
//   that; which side of the cut is the broken one cannot be known from either gone     its connection closed
//   without a goodbye
//
// The watcher of each rank answers pings of its neighbours, and pings them. Whatever breaks the ring, it
// passes on to the other side, so that ranks further on learn of it too, and at once.
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "clock.h"
#include "process.h"
#include "ring.h"

namespace tfring {
namespace {

constexpr int kPingsPerLimit = 5;         // in lost_seconds_
constexpr double kMostPingSeconds = 3.0;  // between two of them
constexpr int kMostUnanswered = 16;       // more would only fill the connection

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// Whether the kernel at the other end of a connection acknowledged all it was sent.
bool is_acknowledged(int fd) {
  tcp_info facts{};
  socklen_t size = sizeof(facts);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &facts, &size) != 0) return true;  // not a network's
  return facts.tcpi_unacked == 0;
}

}  // namespace

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

// The kernel gives a control connection up when what it sent stays unacknowledged, and probes it while it is
// silent, before the watcher's pings begin. Not so a data connection: a slow rank that takes no data for
// minutes would look to TCP_USER_TIMEOUT as one that is lost.
void prepare_control(int fd, double lost_seconds) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  const unsigned int milliseconds = static_cast<unsigned int>(std::min(lost_seconds * 1e3, 1e9));
  const int probe_seconds = static_cast<int>(std::min(std::max(lost_seconds / 3, 1.0), 3600.0));
  const int num_probes = 3;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &probe_seconds, sizeof(probe_seconds));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_seconds, sizeof(probe_seconds));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &num_probes, sizeof(num_probes));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
}

// Once the ring is open: before, a neighbour may still be in Python, forming it.
void Ring::start_asking() {
  if (world_size_ == 1) return;
  {
    std::lock_guard<std::mutex> lock(control_mutex_);
    for (Control& control : controls_) control.heard = now_nanoseconds();
  }
  wake_watcher();
}

int Ring::watch(int64_t now, int64_t late, std::vector<pollfd>* fds) {
  std::lock_guard<std::mutex> lock(control_mutex_);
  const double period = std::min(lost_seconds_ / kPingsPerLimit, kMostPingSeconds);
  double wait_seconds = kNoHurryMilliseconds / 1e3;
  for (Side side : {kPrevious, kNext}) {
    Control& control = controls_[side];
    read_control(side, now);
    if (control.left || control.closed) continue;
    fds->push_back({control.fd.get(), POLLIN, 0});
    if (control.heard == 0 || !failure_.ok()) continue;
    if (late * 1e-9 > lost_seconds_ / 4) {  // this process was stopped itself: it can blame nobody
      control.heard = now;
    }
    if (seconds_between(control.heard, now) > lost_seconds_) lose(silent(control, now));
    ask(side, now, period);
    const double until_lost = std::max(lost_seconds_ - seconds_between(control.heard, now), 0.0);
    wait_seconds = std::min({wait_seconds, period / 2, until_lost});
  }
  return static_cast<int>(wait_seconds * 1e3) + 1;
}

void Ring::read_control(Side side, int64_t now) {
  Control& control = controls_[side];
  while (!control.left && !control.closed) {
    char* to = reinterpret_cast<char*>(&control.frame) + control.fill;
    const ssize_t got = recv(control.fd.get(), to, sizeof(control.frame) - control.fill, MSG_DONTWAIT);
    if (got < 0 && would_block(errno)) return;
    if (got <= 0) {
      const bool unreachable = got < 0 && errno != ECONNRESET;  // ETIMEDOUT, EHOSTUNREACH
      control.closed = true;
      lose(unreachable ? cut_off(control, seconds_between(control.heard, now)) : died(control));
      return;
    }
    if (control.heard != 0) control.heard = now;
    control.fill += static_cast<size_t>(got);
    if (control.fill < sizeof(control.frame)) continue;
    control.fill = 0;
    take_control(side);
  }
}

void Ring::take_control(Side side) {
  Control& control = controls_[side];
  ControlFrame& frame = control.frame;
  frame.message[sizeof(frame.message) - 1] = '\0';
  if (frame.magic != kControlMagic || frame.version != kProtocolVersion) {
    control.closed = true;
    fail_from(current(), {Code::kInternal,
                          "rank " + std::to_string(control.rank) + " sent a control frame that is none"});
    return;
  }
  switch (static_cast<ControlType>(frame.type)) {
    case ControlType::kAbort: {
      if (frame.sequence >= fails_from_) return;
      const bool known =
          frame.code > static_cast<int>(Code::kOk) && frame.code <= static_cast<int>(Code::kInternal);
      failure_ = Status(known ? static_cast<Code>(frame.code) : Code::kInternal, frame.message);
      if (failure_.message.empty())
        failure_.message = "rank " + std::to_string(frame.rank) + " gave up without a word";
      fails_from_ = frame.sequence;
      send_control(side == kPrevious ? kNext : kPrevious, frame);
      announce();
      return;
    }
    case ControlType::kGoodbye:
      control.left = true;
      control.left_finished = frame.sequence;
      announce();
      return;
    case ControlType::kPing:
      answer(side);
      return;
    case ControlType::kPong:
      control.unanswered = 0;
      control.answered = control.heard;
      control.begun = frame.sequence;
      std::memcpy(&control.pong, frame.message, sizeof(control.pong));
      control.pong.num_waiting = std::min<uint32_t>(control.pong.num_waiting, kMostWaiting);
      control.pong.last_call[sizeof(control.pong.last_call) - 1] = '\0';
      return;
  }
}

// There is room: few frames are ever on their way.
void Ring::send_control(Side side, const ControlFrame& frame) {
  const Control& control = controls_[side];
  if (control.fd.get() < 0) return;
  const ssize_t sent = send(control.fd.get(), &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT);
  (void)sent;  // a neighbour that is gone needs no telling
}

void Ring::ask(Side side, int64_t now, double period) {
  Control& control = controls_[side];
  if (control.heard == 0 || control.left || control.closed) return;
  if (seconds_between(control.asked, now) < period || control.unanswered >= kMostUnanswered) return;
  control.asked = now;
  ++control.unanswered;
  send_control(side, make_control(ControlType::kPing, rank_, 0));
}

void Ring::answer(Side side) {
  ControlFrame frame = make_control(ControlType::kPong, rank_, sequence_ + 1);
  Pong pong{};
  pong.in_collective = running_ ? 1 : 0;
  tell_waiting(&pong);
  copy_text(pong.last_call, sizeof(pong.last_call), describe(header_).c_str());
  std::memcpy(frame.message, &pong, sizeof(pong));
  send_control(side, frame);
}

// A neighbour is lost. Where the ring has failed in a later collective, that is why.
Status Ring::lose(const std::string& message) {
  return fail_from(current(), failure_.ok() ? Status(Code::kPeerLost, message) : failure_);
}

// Breaks the ring here and, through the neighbours, everywhere. Returns why collective `sequence` fails.
Status Ring::fail_from(uint64_t sequence, const Status& status) {
  if (fails_from_ <= sequence) return failure_;
  failure_ = status;
  fails_from_ = sequence;
  const ControlFrame frame = make_control(ControlType::kAbort, rank_, sequence, status.code, status.message);
  send_control(kPrevious, frame);
  send_control(kNext, frame);
  announce();
  return failure_;
}

// Wakes a collective.
void Ring::announce() {
  const uint64_t one = 1;
  const ssize_t written = write(news_fd_.get(), &one, sizeof(one));
  (void)written;
}

// In words.

std::string Ring::here() const {
  return describe(header_) + ", collective " + std::to_string(sequence_) + " of ring \"" + name_ + "\"";
}

std::string Ring::during() const {
  if (sequence_ == UINT64_MAX) return "while ring \"" + name_ + "\" was opened";
  return (running_ ? "during " : "after ") + here();
}

std::string Ring::name_of_peer(const Control& control) const {
  return "rank " + std::to_string(control.rank) + " on " + control.host;
}

std::string Ring::died(const Control& control) const {
  return "rank " + std::to_string(control.rank) + " died: its process on " + control.host +
         " is gone, and its connection to rank " + std::to_string(rank_) + " closed " + during();
}

std::string Ring::cut_off(const Control& control, double seconds) const {
  const bool smaller = rank_ < control.rank;
  const std::string mine = "rank " + std::to_string(rank_) + " on " + host_;
  const std::string theirs = name_of_peer(control);
  return (smaller ? mine : theirs) + " and " + (smaller ? theirs : mine) + " cannot reach each other since " +
         seconds_text(seconds) +
         ": the link between them is cut, or one of the two hosts is down; seen by rank " +
         std::to_string(rank_) + " " + during();
}

std::string Ring::silent(const Control& control, int64_t now) const {
  const double seconds = seconds_between(control.heard, now);
  if (!is_acknowledged(control.fd.get())) return cut_off(control, seconds);
  return name_of_peer(control) +
         " is stopped (by a signal, a debugger, or its machine): its host answers, but its process "
         "has not for " +
         seconds_text(seconds) + "; seen by rank " + std::to_string(rank_) + " " + during();
}

}  // namespace tfring
