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
#include "liveness.h"

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
#include "watcher.h"

namespace tfring {
namespace {

constexpr int kPingsPerLimit = 5;         // in lost_seconds
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

}  // namespace

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

Peer::Peer(const tfring_link& link, double lost_seconds)
    : rank(link.rank), host(link.host), control_fd(link.control_fd) {
  prepare_control(link.control_fd, lost_seconds);
}

Liveness::Liveness(const Settings& settings, News* news)
    : settings_(settings),
      news_(*news),
      calls_(settings.rank, settings.world_size),
      peers_(static_cast<size_t>(settings.world_size)) {}

Status Liveness::greet(const Peer& peer) const {
  if (!failure_.ok()) pass_on(peer);
  if (closed_) {
    send_control(peer, make_control(ControlType::kGoodbye, settings_.rank, calls_.common(peer.rank)));
    return {Code::kInvalid, "this communicator is closed"};
  }
  send_control(peer,
               make_control(ControlType::kPing, settings_.rank, 0));  // who has spoken is asked from then on
  return {};
}

void Liveness::start_asking(int64_t now) {
  for (const auto& peer : peers_) {
    if (peer != nullptr && peer->heard == 0) peer->heard = now;
  }
}

bool Liveness::close() {
  if (closed_) return false;
  closed_ = true;
  for (auto& peer : peers_) {
    if (peer == nullptr) continue;
    send_control(*peer, make_control(ControlType::kGoodbye, settings_.rank, calls_.common(peer->rank)));
    peer.reset();
  }
  return true;
}

int Liveness::watch(int64_t now, int64_t late, std::vector<pollfd>* fds) {
  const double period = std::min(settings_.lost_seconds / kPingsPerLimit, kMostPingSeconds);
  double wait_seconds = Watched::kNoHurryMilliseconds / 1e3;
  for (const auto& at : peers_) {
    Peer* peer = at.get();
    if (peer == nullptr) continue;
    read_control(peer, now);
    if (peer->left || peer->closed) continue;
    fds->push_back({peer->control_fd.get(), POLLIN, 0});
    if (peer->heard == 0 || !failure_.ok()) continue;
    if (late * 1e-9 > settings_.lost_seconds / 4) {  // this process was stopped itself: it can blame no peer
      peer->heard = now;
    }
    if (seconds_between(peer->heard, now) > settings_.lost_seconds) lose(silent(*peer, now));
    ask(peer, now, period);
    const double until_lost = std::max(settings_.lost_seconds - seconds_between(peer->heard, now), 0.0);
    wait_seconds = std::min({wait_seconds, period / 2, until_lost});
  }
  return static_cast<int>(wait_seconds * 1e3) + 1;
}

void Liveness::read_control(Peer* peer, int64_t now) {
  while (!peer->left && !peer->closed) {
    char* to = reinterpret_cast<char*>(&peer->frame) + peer->fill;
    const ssize_t got = recv(peer->control_fd.get(), to, sizeof(peer->frame) - peer->fill, MSG_DONTWAIT);
    if (got < 0 && would_block(errno)) return;
    if (got <= 0) {
      const bool unreachable = got < 0 && errno != ECONNRESET;  // ETIMEDOUT, EHOSTUNREACH
      peer->closed = true;
      lose(unreachable ? cut_off(*peer, seconds_between(peer->heard, now)) : died(*peer));
      return;
    }
    peer->heard = now;
    peer->fill += static_cast<size_t>(got);
    if (peer->fill < sizeof(peer->frame)) continue;
    peer->fill = 0;
    take_control(peer);
  }
}

void Liveness::take_control(Peer* peer) {
  ControlFrame& frame = peer->frame;
  frame.message[sizeof(frame.message) - 1] = '\0';
  if (frame.magic != kControlMagic || frame.version != kProtocolVersion) {
    peer->closed = true;
    break_up({Code::kInternal, "rank " + std::to_string(peer->rank) + " sent a control frame that is none"});
    return;
  }
  switch (static_cast<ControlType>(frame.type)) {
    case ControlType::kAbort: {
      if (frame.sequence >= peer->fails_from) return;
      const bool known =
          frame.code > static_cast<int>(Code::kOk) && frame.code <= static_cast<int>(Code::kInternal);
      peer->failure = Status(known ? static_cast<Code>(frame.code) : Code::kInternal, frame.message);
      if (peer->failure.message.empty())
        peer->failure.message = "rank " + std::to_string(frame.rank) + " gave up without a word";
      peer->fails_from = frame.sequence;
      adopt_due_failures();
      return;
    }
    case ControlType::kGoodbye:
      peer->left = true;
      peer->left_finished = frame.sequence;
      news_.announce();
      return;
    case ControlType::kRaised:
      peer->raised_after = frame.sequence;
      peer->raised = frame.message;
      return;
    case ControlType::kPing:
      answer(*peer);
      return;
    case ControlType::kPong:
      peer->unanswered = 0;
      peer->answered = peer->heard;
      peer->report.begun = frame.sequence;
      std::memcpy(&peer->report.pong, frame.message, sizeof(Pong));
      peer->report.pong.num_waiting = std::min<uint32_t>(peer->report.pong.num_waiting, kMostWaiting);
      peer->report.pong.num_chain = std::min<uint32_t>(peer->report.pong.num_chain, kMostChain);
      return;
  }
}

// Adopts the failures that peers reported, where they concern the call under way here, or the next. Returns
// whether the world is broken. Where a peer gave up in a later call with this rank than the one under way,
// that one can still finish.
bool Liveness::adopt_due_failures() {
  for (const auto& peer : peers_) {
    if (!failure_.ok()) return true;
    if (peer == nullptr || peer->failure.ok()) continue;
    const uint64_t common = calls_.common(peer->rank);
    const bool goes_on = calls_.is_running() && calls_.takes_part(peer->rank)
                             ? common < peer->fails_from
                             : !calls_.is_running() && common + 1 < peer->fails_from;
    if (!goes_on) break_up(peer->failure);
  }
  return !failure_.ok();
}

// There is room: few frames are ever on their way.
void Liveness::send_control(const Peer& peer, const ControlFrame& frame) const {
  if (peer.control_fd.get() < 0) return;
  const ssize_t sent = ::send(peer.control_fd.get(), &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT);
  (void)sent;  // a peer that is gone needs no telling
}

void Liveness::ask(Peer* peer, int64_t now, double period) {
  if (peer->heard == 0 || peer->left || peer->closed) return;
  if (seconds_between(peer->asked, now) < period || peer->unanswered >= kMostUnanswered) return;
  peer->asked = now;
  ++peer->unanswered;
  send_control(*peer, make_control(ControlType::kPing, settings_.rank, calls_.asked_number(peer->rank)));
}

void Liveness::answer(const Peer& peer) const {
  ControlFrame frame = make_control(ControlType::kPong, settings_.rank, calls_.common(peer.rank));
  Pong pong{};
  calls_.tell(peer.rank, peer.frame.sequence, &pong);
  pong.stands_still = stands_still_ ? 1 : 0;
  pong.cpu_nanoseconds = cpu_nanoseconds();
  tell_waiting(&pong);
  std::memcpy(frame.message, &pong, sizeof(pong));
  send_control(peer, frame);
}

// A peer is lost. Where another has told of a failure in a call still to come, that is why.
Status Liveness::lose(const std::string& message) {
  for (const auto& peer : peers_) {
    if (failure_.ok() && peer != nullptr && !peer->failure.ok()) return break_up(peer->failure);
  }
  return break_up({Code::kPeerLost, message});
}

// Breaks the world here and, through the peers, everywhere. Returns why calls fail from now on.
Status Liveness::break_up(const Status& status) {
  if (!failure_.ok()) return failure_;
  failure_ = status;
  broke_in_call_ = calls_.is_running();
  for (const auto& peer : peers_) {
    if (peer != nullptr) pass_on(*peer);
  }
  news_.announce();
  return failure_;
}

void Liveness::tell_raised(const std::string& error) {
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    peer->told_after = calls_.common(peer->rank);
    send_control(*peer,
                 make_control(ControlType::kRaised, settings_.rank, peer->told_after, Code::kOk, error));
  }
}

bool Liveness::has_raised(const Peer& peer) const {
  return peer.raised_after + 1 == calls_.common(peer.rank) && peer.told_after != peer.raised_after;
}

// Tells a peer why, and from which of the calls with it on.
void Liveness::pass_on(const Peer& peer) const {
  const bool current = broke_in_call_ && calls_.takes_part(peer.rank);
  const uint64_t first = calls_.common(peer.rank) + (current ? 0 : 1);
  send_control(peer,
               make_control(ControlType::kAbort, settings_.rank, first, failure_.code, failure_.message));
}

Status Liveness::interrupt(const Status& status) {
  const Status failure = break_up(status);
  interrupted_ = true;
  return {Code::kInterrupted, failure.message};
}

Status Liveness::lose_dead(int rank) { return lose(died(*peer(rank))); }

Status Liveness::failure() const {
  if (interrupted_) return {Code::kInterrupted, failure_.message};
  for (const auto& peer : peers_) {
    if (failure_.ok() && peer != nullptr && !peer->failure.ok()) return peer->failure;
  }
  return failure_;
}

// Returns the failure to a caller: in full to the first that meets it.
Status Liveness::refusal() {
  if (told_) {
    return {failure_.code, "ring \"" + settings_.name + "\" can no longer be used: " + failure_.message};
  }
  told_ = true;
  return failure_;
}

Status Liveness::begin(const CallHeader& header) {
  calls_.begin(header);
  if (!adopt_due_failures() && check_left().ok()) return {};
  calls_.end();
  return refusal();
}

void Liveness::end(const Status& status) {
  calls_.end();
  if (!status.ok()) told_ = true;
  adopt_due_failures();
}

// Checks whether a peer left without finishing the call under way. One that did has sent everything and needs
// nothing more.
Status Liveness::check_left() {
  if (!failure_.ok()) return failure_;
  for (const auto& peer : peers_) {
    if (peer == nullptr || !peer->left || !calls_.takes_part(peer->rank)) continue;
    if (peer->left_finished >= calls_.common(peer->rank)) continue;
    return break_up({Code::kPeerLost, "rank " + std::to_string(peer->rank) +
                                          " left the ring (its script ended?) while rank " +
                                          std::to_string(settings_.rank) + " called " + here()});
  }
  return {};
}

// Adopts the failure of a peer that gave up in a later call: this one could still have been finished, but
// nothing moves.
Status Liveness::adopt_peer_failure() {
  for (const auto& peer : peers_) {
    if (peer != nullptr && !peer->failure.ok()) return break_up(peer->failure);
  }
  return {};
}

// Breaks the world where a peer has reported that it is in a call that cannot be matched with this rank's, or
// waits for this rank as this rank waits for it.
Status Liveness::compare_calls(const Peer& peer) {
  if (const CallHeader* theirs = calls_.contradiction(peer.rank, peer.report)) {
    return break_up({Code::kMismatch, disagreement(peer.rank, *theirs)});
  }
  const std::string circle = calls_.follow(peer.rank, peer.report);
  if (circle.empty()) return {};
  return break_up({Code::kMismatch,
                   "ranks disagree: they wait for each other in a circle, each in a call that the "
                   "next has not begun: " +
                       circle + ". " + disagreement(peer.rank, peer.report.pong.header)});
}

// Fails with what the peer's header says, unless its control connection says more: a peer that gave up in
// this call has told why before it went on.
Status Liveness::report_disagreement(int rank, const CallHeader& theirs, int64_t now) {
  read_control(peer(rank), now);
  if (!failure_.ok()) return failure_;
  return break_up({Code::kMismatch, disagreement(rank, theirs)});
}

// In words.

std::string Liveness::during() const {
  if (!calls_.has_begun_any()) return "while ring \"" + settings_.name + "\" was opened";
  return (calls_.is_running() ? "during " : "after ") + here();
}

std::string Liveness::died(const Peer& peer) const {
  return "rank " + std::to_string(peer.rank) + " died: its process on " + peer.host +
         " is gone, and its connection to rank " + std::to_string(settings_.rank) + " closed " + during();
}

std::string Liveness::cut_off(const Peer& peer, double seconds) const {
  const bool smaller = settings_.rank < peer.rank;
  const std::string mine = "rank " + std::to_string(settings_.rank) + " on " + settings_.host;
  const std::string theirs = peer.name();
  return (smaller ? mine : theirs) + " and " + (smaller ? theirs : mine) + " cannot reach each other since " +
         seconds_text(seconds) +
         ": the link between them is cut, or one of the two hosts is down; seen by rank " +
         std::to_string(settings_.rank) + " " + during();
}

std::string Liveness::silent(const Peer& peer, int64_t now) const {
  const double seconds = seconds_between(peer.heard, now);
  if (!is_acknowledged(peer.control_fd.get())) return cut_off(peer, seconds);
  return peer.name() +
         " is stopped (by a signal, a debugger, or its machine): its host answers, but its process "
         "has not for " +
         seconds_text(seconds) + "; seen by rank " + std::to_string(settings_.rank) + " " + during();
}

std::string Liveness::disagreement(int rank, const CallHeader& theirs) const {
  const CallHeader& mine = calls_.header();
  return "ranks disagree: rank " + std::to_string(rank) + " called " + describe(theirs) + " as " +
         describe_place(theirs) + " of ring \"" + settings_.name + "\", rank " +
         std::to_string(settings_.rank) + " called " + describe(mine) + " as " + describe_place(mine);
}

}  // namespace tfring
