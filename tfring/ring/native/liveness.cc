// Peers that leave, die, stop or are cut off, as the watcher's thread detects, inside or outside of calls.
//
//   - slow (wait.cc): alive and busy in Python, in a checkpoint, in a debugger; not an error before
//     timeout_seconds.
//   - stopped: its host acknowledges the data it is sent, but its process does not answer.
//   - cut off: its host does not acknowledge either; neither side can know which side is broken.
//   - gone: its connection closed without a closing frame.
//
// The watcher of each rank answers pings of its peers, and pings them. It passes every failure that breaks
// the ring on to the others, so that distant ranks learn of it at once as well.
#include "liveness.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "clock.h"
#include "process.h"

namespace tfring {
namespace {

constexpr int kPingsPerLimit = 5;         // pings in lost_seconds
constexpr double kMostPingSeconds = 3.0;  // between two pings
constexpr double kPauseSeconds = 0.1;     // before it tries again, if the kernel cannot poll for more

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

Liveness::Liveness(const Settings& settings, WakeEvent* wake_event)
    : settings_(settings),
      wake_event_(*wake_event),
      calls_(settings.rank, settings.world_size),
      peers_(static_cast<size_t>(settings.world_size)) {}

Status Liveness::send_hello(Peer* peer) {
  if (!failure_.ok()) pass_on(peer);
  if (closed_) {
    peer->send(make_control(ControlType::kClosed, settings_.rank, calls_.common(peer->rank)));
    return {Code::kInvalid, "this communicator is closed"};
  }
  peer->send(make_control(ControlType::kPing, settings_.rank, 0));  // a rank is asked once it has spoken
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
    peer->send(make_control(ControlType::kClosed, settings_.rank, calls_.common(peer->rank)));
    (void)poll_for(peer.get(), 0);
    peer.reset();
  }
  return true;
}

void Liveness::hear(int rank, int64_t now) {
  if (peer(rank) != nullptr) read_control(peer(rank), now);
}

bool Liveness::poll_for(Peer* peer, uint32_t events) {
  if (!poll_.change(peer->control_fd.get(), peer->rank, peer->polled_for, events)) return false;
  peer->polled_for = events;
  return true;
}

int Liveness::watch(int64_t now, int64_t late, const Poll& poll) {
  poll_ = poll;
  const double period = std::min(settings_.lost_seconds / kPingsPerLimit, kMostPingSeconds);
  double wait_seconds = Watched::kNoHurryMilliseconds / 1e3;
  for (const auto& at : peers_) {
    Peer* peer = at.get();
    if (peer == nullptr) continue;
    const bool is_over = peer->left || peer->closed;
    if (!is_over && !peer->unsent.empty()) peer->send_unsent();
    const uint32_t events = is_over ? 0 : peer->unsent.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
    if (!poll_for(peer, events)) wait_seconds = std::min(wait_seconds, kPauseSeconds);
    if (is_over) continue;
    if (peer->heard == 0 || !failure_.ok()) continue;
    // Silence counts from this thread's first check. If this thread is late, this process itself was stopped
    // and cannot blame a peer.
    if (!peer->is_watched || late * 1e-9 > settings_.lost_seconds / 4) peer->heard = now;
    peer->is_watched = true;
    if (seconds_between(peer->heard, now) > settings_.lost_seconds) (void)lose(silent(*peer, now));
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
      (void)lose(unreachable ? cut_off(*peer, seconds_between(peer->heard, now)) : died(*peer));
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
    (void)break_up({Code::kInternal, "rank " + std::to_string(peer->rank) + " sent an invalid control frame",
                    Reason::kNone, peer->rank});
    return;
  }
  switch (static_cast<ControlType>(frame.type)) {
    case ControlType::kAbort: {
      if (frame.sequence >= peer->fails_from) return;
      const bool known =
          frame.code > static_cast<int>(Code::kOk) && frame.code <= static_cast<int>(Code::kInternal);
      const bool has_reason = frame.reason >= 0 && frame.reason <= kLastReason;
      peer->failure =
          Status(known ? static_cast<Code>(frame.code) : Code::kInternal, frame.message,
                 has_reason ? static_cast<Reason>(frame.reason) : Reason::kNone, frame.rank, frame.other);
      if (peer->failure.message.empty())
        peer->failure.message = "rank " + std::to_string(peer->rank) + " aborted without a reason";
      peer->fails_from = frame.sequence;
      adopt_due_failures();
      return;
    }
    case ControlType::kClosed:
      peer->left = true;
      peer->left_finished = frame.sequence;
      wake_event_.announce();
      return;
    case ControlType::kRaised:
      peer->raised_after = frame.sequence;
      peer->raised = frame.message;
      return;
    case ControlType::kAwaited:
      warn("All ranks wait for rank " + std::to_string(settings_.rank) + ", whose main thread is at", true);
      return;
    case ControlType::kPing:
      answer(peer);
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

// Adopts the failures that peers reported, if they concern the current call or the next. Returns whether the
// world is broken. If a peer gave up in a later call with this rank than the current one, the current call
// can still finish.
bool Liveness::adopt_due_failures() {
  for (const auto& peer : peers_) {
    if (!failure_.ok()) return true;
    if (peer == nullptr || peer->failure.ok()) continue;
    const uint64_t common = calls_.common(peer->rank);
    const bool goes_on = calls_.is_running() && calls_.takes_part(peer->rank)
                             ? common < peer->fails_from
                             : !calls_.is_running() && common + 1 < peer->fails_from;
    if (!goes_on) (void)break_up(peer->failure);
  }
  return !failure_.ok();
}

void Liveness::ask(Peer* peer, int64_t now, double period) {
  if (peer->heard == 0 || peer->left || peer->closed) return;
  if (seconds_between(peer->asked, now) < period || peer->unanswered >= kMostUnanswered) return;
  peer->asked = now;
  ++peer->unanswered;
  peer->send(make_control(ControlType::kPing, settings_.rank, calls_.asked_number(peer->rank)));
}

void Liveness::answer(Peer* peer) {
  ControlFrame frame = make_control(ControlType::kPong, settings_.rank, calls_.common(peer->rank));
  Pong pong{};
  calls_.tell(peer->rank, peer->frame.sequence, &pong);
  pong.stands_still = stands_still_ ? 1 : 0;
  pong.cpu_nanoseconds = cpu_nanoseconds();
  notify_waiting(&pong);
  std::memcpy(frame.message, &pong, sizeof(pong));
  peer->send(frame);
}

// Breaks the world because a peer is lost. If another rank has reported a failure in a later call, that is
// the reason.
Status Liveness::lose(const Status& why) {
  for (const auto& peer : peers_) {
    if (failure_.ok() && peer != nullptr && !peer->failure.ok()) return break_up(peer->failure);
  }
  return break_up(why);
}

// Breaks the world on this rank and, through the peers, on all ranks. Returns why calls fail from now on.
Status Liveness::break_up(const Status& status) {
  if (!failure_.ok()) return failure_;
  failure_ = status;
  broke_in_call_ = calls_.is_running();
  if (broke_in_call_) std::memcpy(failed_in_, calls_.header().name, sizeof(failed_in_));
  for (const auto& peer : peers_) {
    if (peer != nullptr) pass_on(peer.get());
  }
  wake_event_.announce();
  return failure_;
}

void Liveness::tell_raised(const std::string& error) {
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    peer->told_after = calls_.common(peer->rank);
    peer->send(make_control(ControlType::kRaised, settings_.rank, peer->told_after, error));
  }
}

bool Liveness::has_raised(const Peer& peer) const {
  return peer.raised_after + 1 == calls_.common(peer.rank) && peer.told_after != peer.raised_after;
}

Status Liveness::lose_to_its_error(const Peer& peer) {
  return break_up({Code::kPeerLost,
                   "rank " + std::to_string(peer.rank) + " failed while rank " +
                       std::to_string(settings_.rank) + " waited for it in " + here() + ": " + peer.raised,
                   Reason::kRaised, peer.rank});
}

// Tells a peer the reason, and the first of the calls with it that fails.
void Liveness::pass_on(Peer* peer) {
  const bool current = broke_in_call_ && calls_.takes_part(peer->rank);
  peer->send(make_abort(calls_.common(peer->rank) + (current ? 0 : 1), failure_));
}

Status Liveness::interrupt(const Status& status) {
  Status failure = break_up(status);
  interrupted_ = true;
  failure.code = Code::kInterrupted;
  return failure;
}

Status Liveness::lose_dead(int rank) { return lose(died(*peer(rank))); }

Status Liveness::failure() const {
  for (const auto& peer : peers_) {
    if (failure_.ok() && peer != nullptr && !peer->failure.ok()) return peer->failure;
  }
  Status failure = failure_;
  if (interrupted_) failure.code = Code::kInterrupted;
  failure.call = failed_in_;
  return failure;
}

// Returns the failure to a caller: to the first one as it is, later with a note that the ring is unusable.
Status Liveness::refusal() {
  if (told_) {
    Status again = failure_;
    again.message = "ring \"" + settings_.name + "\" can no longer be used: " + failure_.message;
    return again;
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

// Checks whether a peer left without finishing the current call. A peer that finished it has sent all its
// data and needs no more.
Status Liveness::check_left() {
  if (!failure_.ok()) return failure_;
  for (const auto& peer : peers_) {
    if (peer == nullptr || !peer->left || !calls_.takes_part(peer->rank)) continue;
    if (peer->left_finished >= calls_.common(peer->rank)) continue;
    if (has_raised(*peer)) return lose_to_its_error(*peer);
    return break_up({Code::kPeerLost,
                     "rank " + std::to_string(peer->rank) + " left the ring (its script ended?) while rank " +
                         std::to_string(settings_.rank) + " called " + here(),
                     Reason::kLeft, peer->rank});
  }
  return {};
}

// Adopts the failure of a peer that gave up in a later call: the current call could still have finished, but
// no bytes move.
Status Liveness::adopt_peer_failure() {
  for (const auto& peer : peers_) {
    if (peer != nullptr && !peer->failure.ok()) return break_up(peer->failure);
  }
  return {};
}

// Breaks the world if a peer has reported that it is in a call that cannot match this rank's, or waits for
// this rank while this rank waits for it.
Status Liveness::compare_calls(const Peer& peer) {
  if (const CallHeader* theirs = calls_.contradiction(peer.rank, peer.report)) {
    return break_up(
        {Code::kMismatch, disagreement(peer.rank, *theirs), Reason::kCallsDiffer, peer.rank, settings_.rank});
  }
  const std::string circle = calls_.follow(peer.rank, peer.report);
  if (circle.empty()) return {};
  return break_up({Code::kMismatch,
                   "ranks disagree: they wait for each other in a circle, each in a call that the "
                   "next has not begun: " +
                       circle + ". " + disagreement(peer.rank, peer.report.pong.header),
                   Reason::kCallsDiffer, peer.rank, settings_.rank});
}

// Fails with the call in the peer's header, unless its control connection has a reason: a peer that gave up
// in this call has sent the reason before it continued.
Status Liveness::report_disagreement(int rank, const CallHeader& theirs, int64_t now) {
  read_control(peer(rank), now);
  if (!failure_.ok()) return failure_;
  return break_up({Code::kMismatch, disagreement(rank, theirs), Reason::kCallsDiffer, rank, settings_.rank});
}

// Texts of failures.

std::string Liveness::during() const {
  if (!calls_.has_begun_any()) return "while ring \"" + settings_.name + "\" was opened";
  return (calls_.is_running() ? "during " : "after ") + here();
}

Status Liveness::died(const Peer& peer) const {
  return {Code::kPeerLost,
          "rank " + std::to_string(peer.rank) + " died: its process on " + peer.host +
              " is gone, and its connection to rank " + std::to_string(settings_.rank) + " closed " +
              during(),
          Reason::kDied, peer.rank};
}

Status Liveness::cut_off(const Peer& peer, double seconds) const {
  const bool smaller = settings_.rank < peer.rank;
  const std::string mine = "rank " + std::to_string(settings_.rank) + " on " + settings_.host;
  const std::string theirs = peer.name();
  return {Code::kPeerLost,
          (smaller ? mine : theirs) + " and " + (smaller ? theirs : mine) +
              " have not been able to reach each other for " + seconds_text(seconds) +
              ": the link between them is cut, or one of the two hosts is down; seen by rank " +
              std::to_string(settings_.rank) + " " + during(),
          Reason::kCutOff, peer.rank, settings_.rank};
}

Status Liveness::silent(const Peer& peer, int64_t now) const {
  const double seconds = seconds_between(peer.heard, now);
  if (!peer.is_acknowledged()) return cut_off(peer, seconds);
  return {Code::kPeerLost,
          peer.name() +
              " is stopped (by a signal, a debugger, or its machine): its host answers, but its process "
              "has not for " +
              seconds_text(seconds) + "; seen by rank " + std::to_string(settings_.rank) + " " + during(),
          Reason::kStopped, peer.rank};
}

std::string Liveness::disagreement(int rank, const CallHeader& theirs) const {
  const CallHeader& mine = calls_.header();
  return "ranks disagree: rank " + std::to_string(rank) + " called " + describe(theirs) + " as " +
         describe_place(theirs) + " of ring \"" + settings_.name + "\", rank " +
         std::to_string(settings_.rank) + " called " + describe(mine) + " as " + describe_place(mine) +
         ". All ranks must make the same calls in the same order, none of them under `if rank == 0:`, with "
         "values of the same shape and dtype";
}

}  // namespace tfring
