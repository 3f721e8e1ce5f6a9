// Peers that leave, die, stop or are cut off, seen by the watcher's thread, in a call or not.
//
//   - slow (wait.cc): alive, and busy in Python, in a checkpoint, in a debugger; not an error before
//     timeout_seconds.
//   - stopped: its host acknowledges what it is sent, its process answers nothing.
//   - cut off: not even that; which side of the cut is the broken one cannot be known from either.
//   - gone: its connection closed without a goodbye.
//
// The watcher of each rank answers pings of its peers, and pings them. Whatever breaks the ring, it passes on
// to the others, so that ranks further on learn of it too, and at once.
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "clock.h"
#include "process.h"
#include "world.h"

namespace tfring {
namespace {

constexpr int kPingsPerLimit = 5;         // in lost_seconds_
constexpr double kMostPingSeconds = 3.0;  // between two of them
constexpr int kMostUnanswered = 16;       // more would only fill the connection

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// Returns whether the kernel at the other end of a connection acknowledged all that was written to it, sent
// or not.
bool is_acknowledged(int fd) {
  tcp_info facts{};
  socklen_t size = sizeof(facts);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &facts, &size) != 0) return true;  // not a network's
  int left = 0;
  return ioctl(fd, SIOCOUTQ, &left) == 0 ? left == 0 : facts.tcpi_unacked == 0;
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

// Once the ring is open: before, a peer may still be in Python, forming it.
void World::start_asking() {
  if (world_size_ == 1) return;
  {
    std::lock_guard<std::mutex> lock(control_mutex_);
    for (const auto& link : links_) {
      if (link != nullptr && link->heard == 0) link->heard = now_nanoseconds();
    }
  }
  wake_watcher();
}

int World::watch(int64_t now, int64_t late, std::vector<pollfd>* fds) {
  std::lock_guard<std::mutex> lock(control_mutex_);
  const double period = std::min(lost_seconds_ / kPingsPerLimit, kMostPingSeconds);
  double wait_seconds = kNoHurryMilliseconds / 1e3;
  for (const auto& at : links_) {
    Link* link = at.get();
    if (link == nullptr) continue;
    read_control(link, now);
    if (link->left || link->closed) continue;
    fds->push_back({link->control_fd.get(), POLLIN, 0});
    if (link->heard == 0 || !failure_.ok()) continue;
    if (late * 1e-9 > lost_seconds_ / 4) {  // this process was stopped itself: it can blame no peer
      link->heard = now;
    }
    if (seconds_between(link->heard, now) > lost_seconds_) lose(silent(*link, now));
    ask(link, now, period);
    const double until_lost = std::max(lost_seconds_ - seconds_between(link->heard, now), 0.0);
    wait_seconds = std::min({wait_seconds, period / 2, until_lost});
  }
  return static_cast<int>(wait_seconds * 1e3) + 1;
}

void World::read_control(Link* link, int64_t now) {
  while (!link->left && !link->closed) {
    char* to = reinterpret_cast<char*>(&link->frame) + link->fill;
    const ssize_t got = recv(link->control_fd.get(), to, sizeof(link->frame) - link->fill, MSG_DONTWAIT);
    if (got < 0 && would_block(errno)) return;
    if (got <= 0) {
      const bool unreachable = got < 0 && errno != ECONNRESET;  // ETIMEDOUT, EHOSTUNREACH
      link->closed = true;
      lose(unreachable ? cut_off(*link, seconds_between(link->heard, now)) : died(*link));
      return;
    }
    link->heard = now;
    link->fill += static_cast<size_t>(got);
    if (link->fill < sizeof(link->frame)) continue;
    link->fill = 0;
    take_control(link);
  }
}

void World::take_control(Link* link) {
  ControlFrame& frame = link->frame;
  frame.message[sizeof(frame.message) - 1] = '\0';
  if (frame.magic != kControlMagic || frame.version != kProtocolVersion) {
    link->closed = true;
    break_up({Code::kInternal, "rank " + std::to_string(link->rank) + " sent a control frame that is none"});
    return;
  }
  switch (static_cast<ControlType>(frame.type)) {
    case ControlType::kAbort: {
      if (frame.sequence >= link->fails_from) return;
      const bool known =
          frame.code > static_cast<int>(Code::kOk) && frame.code <= static_cast<int>(Code::kInternal);
      link->failure = Status(known ? static_cast<Code>(frame.code) : Code::kInternal, frame.message);
      if (link->failure.message.empty())
        link->failure.message = "rank " + std::to_string(frame.rank) + " gave up without a word";
      link->fails_from = frame.sequence;
      adopt_due_failures();
      return;
    }
    case ControlType::kGoodbye:
      link->left = true;
      link->left_finished = frame.sequence;
      announce();
      return;
    case ControlType::kPing:
      answer(link);
      return;
    case ControlType::kPong:
      link->unanswered = 0;
      link->answered = link->heard;
      link->begun = frame.sequence;
      std::memcpy(&link->pong, frame.message, sizeof(link->pong));
      link->pong.num_waiting = std::min<uint32_t>(link->pong.num_waiting, kMostWaiting);
      link->pong.num_chain = std::min<uint32_t>(link->pong.num_chain, kMostChain);
      return;
  }
}

// Adopts the failures that peers reported, where they concern the call under way here, or the next. Returns
// whether the world is broken. Where a peer gave up in a later call with this rank than the one under way,
// that one can still finish.
bool World::adopt_due_failures() {
  for (const auto& link : links_) {
    if (!failure_.ok()) return true;
    if (link == nullptr || link->failure.ok()) continue;
    const uint64_t calls = common_calls(link->rank);
    const bool goes_on = running_ && takes_part(link->rank) ? calls < link->fails_from
                                                            : !running_ && calls + 1 < link->fails_from;
    if (!goes_on) break_up(link->failure);
  }
  return !failure_.ok();
}

// There is room: few frames are ever on their way.
void World::send_control(const Link& link, const ControlFrame& frame) {
  if (link.control_fd.get() < 0) return;
  const ssize_t sent = ::send(link.control_fd.get(), &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT);
  (void)sent;  // a peer that is gone needs no telling
}

void World::ask(Link* link, int64_t now, double period) {
  if (link->heard == 0 || link->left || link->closed) return;
  if (seconds_between(link->asked, now) < period || link->unanswered >= kMostUnanswered) return;
  link->asked = now;
  ++link->unanswered;
  send_control(*link, make_control(ControlType::kPing, rank_, asked_number(link->rank)));
}

void World::answer(Link* link) {
  ControlFrame frame = make_control(ControlType::kPong, rank_, common_calls(link->rank));
  const size_t peer = static_cast<size_t>(link->rank);
  Pong pong{};
  pong.is_running = running_ ? 1 : 0;
  pong.is_with_you = takes_part(link->rank) ? 1 : 0;
  pong.stands_still = stands_still_ ? 1 : 0;
  pong.call = num_calls_;
  pong.num_sent = num_sent_[peer];
  pong.num_received = num_received_[peer];
  pong.cpu_nanoseconds = cpu_nanoseconds();
  pong.header = header_;
  for (const Past& past : past_) {
    if (link->frame.sequence == 0 || past.numbers[peer] != link->frame.sequence) continue;
    pong.past = past.header;
    pong.past_number = link->frame.sequence;
  }
  pong.num_chain = running_ ? num_chain_ : 0;
  std::copy_n(chain_, pong.num_chain, pong.chain);
  tell_waiting(&pong);
  std::memcpy(frame.message, &pong, sizeof(pong));
  send_control(*link, frame);
}

// A peer is lost. Where another has told of a failure in a call still to come, that is why.
Status World::lose(const std::string& message) {
  for (const auto& link : links_) {
    if (failure_.ok() && link != nullptr && !link->failure.ok()) return break_up(link->failure);
  }
  return break_up({Code::kPeerLost, message});
}

// Breaks the world here and, through the peers, everywhere. Returns why calls fail from now on.
Status World::break_up(const Status& status) {
  if (!failure_.ok()) return failure_;
  failure_ = status;
  broke_in_call_ = running_;
  for (const auto& link : links_) {
    if (link != nullptr) pass_on(failure_, *link);
  }
  announce();
  return failure_;
}

// Tells a peer why, and from which of the calls with it on.
void World::pass_on(const Status& failure, const Link& link) {
  const bool current = broke_in_call_ && takes_part(link.rank);
  const uint64_t first = common_calls(link.rank) + (current ? 0 : 1);
  send_control(link, make_control(ControlType::kAbort, rank_, first, failure.code, failure.message));
}

// Wakes a collective.
void World::announce() {
  const uint64_t one = 1;
  const ssize_t written = write(news_fd_.get(), &one, sizeof(one));
  (void)written;
}

// In words.

std::string World::here() const {
  return describe(header_) + ", " + describe_place(header_) + " of ring \"" + name_ + "\"";
}

std::string World::during() const {
  if (!begun_any_) return "while ring \"" + name_ + "\" was opened";
  return (running_ ? "during " : "after ") + here();
}

std::string World::name_of_peer(const Link& link) const {
  return "rank " + std::to_string(link.rank) + " on " + link.host;
}

std::string World::died(const Link& link) const {
  return "rank " + std::to_string(link.rank) + " died: its process on " + link.host +
         " is gone, and its connection to rank " + std::to_string(rank_) + " closed " + during();
}

std::string World::cut_off(const Link& link, double seconds) const {
  const bool smaller = rank_ < link.rank;
  const std::string mine = "rank " + std::to_string(rank_) + " on " + host_;
  const std::string theirs = name_of_peer(link);
  return (smaller ? mine : theirs) + " and " + (smaller ? theirs : mine) + " cannot reach each other since " +
         seconds_text(seconds) +
         ": the link between them is cut, or one of the two hosts is down; seen by rank " +
         std::to_string(rank_) + " " + during();
}

std::string World::silent(const Link& link, int64_t now) const {
  const double seconds = seconds_between(link.heard, now);
  if (!is_acknowledged(link.control_fd.get())) return cut_off(link, seconds);
  return name_of_peer(link) +
         " is stopped (by a signal, a debugger, or its machine): its host answers, but its process "
         "has not for " +
         seconds_text(seconds) + "; seen by rank " + std::to_string(rank_) + " " + during();
}

}  // namespace tfring
