// Waiting while no bytes move: sleep, and ask the peers why.
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "clock.h"
#include "process.h"
#include "world.h"

namespace tfring {
namespace {

constexpr int kSliceMilliseconds = 100;  // between looks at close() and at Ctrl-C
constexpr double kSliceSeconds = 0.1;
constexpr double kAskSeconds = 1.0;        // between questions to the peers, at most
constexpr double kFirstAskSeconds = 0.25;  // until the first
constexpr double kLastWordsSeconds = 0.5;  // in which a peer's control connection tells why the other closed

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Status World::wait() {
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
  TFRING_TRY(check_news());
  const double idle_seconds = seconds_between(idle_since_, start);
  if (idle_seconds > kLastWordsSeconds) {
    TFRING_TRY(adopt_peer_failure());
    TFRING_TRY(check_step());
  }
  TFRING_TRY(ask_why(start, idle_seconds));
  const double until_timeout = std::max(timeout_seconds_ - idle_seconds, 0.01);
  sleep(static_cast<int>(std::min<double>(kSliceMilliseconds, until_timeout * 1e3)) + 1);
  const int64_t end = now_nanoseconds();
  statistics_.seconds_waited += seconds_between(start, end);
  return look_up(end);
}

// Until something may move, there is news, or the time is over.
void World::sleep(int milliseconds) {
  poll_fds_.assign(1, {news_fd_.get(), POLLIN, 0});
  for (const Queue& queue : plan_.queues) {
    const Link& link = *link_to(queue.rank);
    const bool wants_room =
        queue.send >= 0 && (queue.header_sent < static_cast<int64_t>(sizeof(header_)) || sendable(queue) > 0);
    const bool wants_data = may_receive(queue);
    if (!wants_room && !wants_data) continue;
    if (link.own == nullptr) {
      const int events = (wants_room ? POLLOUT : 0) | (wants_data ? POLLIN : 0);
      poll_fds_.push_back({link.data_fd.get(), static_cast<short>(events), 0});
      continue;
    }
    poll_fds_.push_back({link.own->doorbell_fd(), POLLIN, 0});
    link.own->fall_asleep();
    if ((wants_room && link.sender->ready()) || (wants_data && link.receiver->ready(least_receivable(queue))))
      milliseconds = 0;
  }
  if (milliseconds > 0) poll(poll_fds_.data(), poll_fds_.size(), milliseconds);
  for (const Queue& queue : plan_.queues) {
    Mailbox* own = link_to(queue.rank)->own.get();
    if (own != nullptr) own->wake_up();
  }
  for (const pollfd& fd : poll_fds_) {  // doorbells and news: silence those that rang
    if ((fd.revents & POLLIN) == 0) continue;
    if (fd.fd == news_fd_.get()) silence_news();
    for (const Queue& queue : plan_.queues) {
      Mailbox* own = link_to(queue.rank)->own.get();
      if (own != nullptr && own->doorbell_fd() == fd.fd) own->silence_doorbell();
    }
  }
}

void World::silence_news() {
  uint64_t count;
  const ssize_t got = read(news_fd_.get(), &count, sizeof(count));
  (void)got;
}

// Ten times a second, whether bytes move or not.
Status World::look_up(int64_t now) {
  if (seconds_between(looked_up_, now) < kSliceSeconds && !closing_) return {};
  looked_up_ = now;
  if (closing_) {
    return fail(Code::kPeerLost, "rank " + std::to_string(rank_) + " closed the ring during " + here());
  }
  if (caller_ == TFRING_PYTHON_MAIN_THREAD && python_interrupted()) return interruption();
  if (caller_ == TFRING_TENSORFLOW_OP && op_interrupted()) return interruption();
  return {};
}

Status World::interruption() {
  const Status status =
      fail(Code::kPeerLost, "rank " + std::to_string(rank_) + " was interrupted during " + here());
  interrupted_ = true;
  return {Code::kInterrupted, status.message};
}

// Breaks the ring once the step of this call is cancelled: TensorFlow waits for the call before it reports
// the operation that failed. Ranks on which the same operation fails may still finish the call, so a moment
// passes.
Status World::check_step() {
  if (caller_ != TFRING_TENSORFLOW_OP || !op_cancelled()) return {};
  return fail(Code::kPeerLost, "rank " + std::to_string(rank_) + " gave up in " + here() +
                                   ": another operation of its step failed, as its own error tells");
}

// Checks the reports of peers. One that left after finishing this call has sent everything and needs
// nothing more.
Status World::check_news() {
  std::lock_guard<std::mutex> lock(control_mutex_);
  return check_left();
}

Status World::check_left() {
  if (!failure_.ok()) return failure_;
  for (const auto& link : links_) {
    if (link == nullptr || !link->left || !takes_part(link->rank)) continue;
    if (link->left_finished >= common_calls(link->rank)) continue;
    return break_up({Code::kPeerLost, "rank " + std::to_string(link->rank) +
                                          " left the ring (its script ended?) while rank " +
                                          std::to_string(rank_) + " called " + here()});
  }
  return {};
}

// Adopts the failure of a peer that gave up in a later call: this one could still have been finished, but
// nothing moves.
Status World::adopt_peer_failure() {
  std::lock_guard<std::mutex> lock(control_mutex_);
  for (const auto& link : links_) {
    if (link != nullptr && !link->failure.ok()) return break_up(link->failure);
  }
  return {};
}

void World::stand_still(bool stands) {
  if (stands == stands_still_) return;
  stands_still_ = stands;
  if (!of_all_) return;
  stands ? stands_still(identity_, on_pool_thread_) : moves_again(identity_, on_pool_thread_);
}

bool World::is_pending(int rank) const {
  return std::any_of(plan_.queues.begin(), plan_.queues.end(), [&](const Queue& queue) {
    return queue.rank == rank && (may_receive(queue) || sendable(queue) > 0);
  });
}

// Returns the link this rank waits for: to a peer that has something to send, or else should receive.
Link* World::needed(bool* for_data) const {
  for (const Queue& queue : plan_.queues) {
    if (may_receive(queue)) {
      *for_data = true;
      return link_to(queue.rank);
    }
  }
  *for_data = false;
  for (const Queue& queue : plan_.queues) {
    if (sendable(queue) > 0) return link_to(queue.rank);
  }
  return nullptr;
}

// Returns whether this rank reports the one it waits for: where all members of a group wait for the same one,
// as in a flat plan, only the lowest does.
bool World::reports_stall(int slow) const {
  const size_t others = static_cast<size_t>(group_->size() - 1);
  const bool each_to_each =
      plan_.queues.size() == others &&
      std::all_of(plan_.queues.begin(), plan_.queues.end(), [](const Queue& queue) { return queue.expects; });
  const bool from_one = plan_.queues.size() == 1 && !is_pairwise(static_cast<Kind>(header_.kind));
  if (!each_to_each && !from_one) return true;
  return std::all_of(group_->ranks.begin(), group_->ranks.end(),
                     [&](int rank) { return rank == slow || rank >= rank_; });
}

// Nothing moves. The peers this rank waits for say in which call they are: if in the same, or in one without
// this rank, they wait like this rank, and the rank next to the one that stands still will see to it. A peer
// that answers nothing is the watcher's affair (liveness.cc).
Status World::ask_why(int64_t now, double idle_seconds) {
  crosses_ = false;
  const Status status = ask_peers(now, idle_seconds);
  if (crosses_) break_ring(elsewhere_, status);  // where the peer waits
  return status;
}

Status World::ask_peers(int64_t now, double idle_seconds) {
  const double most = std::min({kAskSeconds, timeout_seconds_ / 4, stall_seconds_ / 4});
  const double period = std::min(most, std::max(kFirstAskSeconds, idle_seconds / 2));
  if (idle_seconds < period) return {};
  stand_still(true);
  std::lock_guard<std::mutex> lock(control_mutex_);
  ++num_asks_;
  const bool needs_all = !is_pairwise(static_cast<Kind>(header_.kind));
  for (size_t i = 0; i < links_.size(); ++i) {
    const int rank = static_cast<int>((i + static_cast<size_t>(num_asks_)) % links_.size());
    Link* link = link_to(rank);
    if (link == nullptr || !takes_part(rank) || !(needs_all || is_pending(rank))) continue;
    ask(link, now, period);
    if (link->answered <= idle_since_) continue;
    if (const CallHeader* theirs = contradiction(*link)) {
      return break_up({Code::kMismatch, disagreement(link->rank, *theirs)});
    }
    TFRING_TRY(follow(*link));
  }
  bool for_data = false;
  const Link* peer = needed(&for_data);
  if (peer == nullptr) return {};
  const std::string who = "rank " + std::to_string(peer->rank);
  const std::string last_call = describe(peer->pong.header);
  const double age = seconds_between(peer->answered, now);  // of what it has told
  const bool answers = peer->answered > idle_since_ && age < 2 * period + kSliceSeconds;
  const bool waits_too = answers && (has_begun(*peer) || peer->pong.is_running != 0);
  const bool absent = answers && !waits_too;

  if (absent && on_pool_thread_ && age < period && wait_for_each_other(peer->pong)) {
    return break_up({Code::kMismatch,
                     "rank " + std::to_string(rank_) + " and " + who +
                         " wait for each other in different rings: all inter-op threads of rank " +
                         std::to_string(rank_) + " wait, one of them in " + here() + ", those of " + who +
                         " in others (" + last_call +
                         " is its last call of this ring). Run the rings' collectives in one order: from one "
                         "tf.function, or from one Python thread; or give TensorFlow a thread for each: "
                         "tf.config.threading.set_inter_op_parallelism_threads(n)"});
  }
  if (absent) TFRING_TRY(wait_crosswise(*peer, now));
  const bool is_crosswise = absent && seconds_between(elsewhere_since_, now) > idle_seconds / 4 &&
                            elsewhere_since_ > idle_since_;  // an error is on its way
  if (absent && for_data && !warned_ && !is_crosswise && idle_seconds > stall_seconds_) {
    warned_ = true;
    if (reports_stall(peer->rank))
      warn(name_of_peer(*peer) + " is slow: all ranks have waited for it for " + seconds_text(idle_seconds) +
           " in " + here() + ". It is alive, and the last it called in this ring is " + last_call +
           ". They go on waiting, up to " + seconds_text(timeout_seconds_) + " (TFRING_TIMEOUT_SECONDS).");
  }
  const double grace = std::min(std::max(0.1 * timeout_seconds_, 0.25), 5.0);
  const double over = idle_seconds - timeout_seconds_;
  if (over < (waits_too ? 10 * grace : grace)) return {};
  const std::string why =
      waits_too ? who + " waits as well, in " + last_call + ", and no rank says for whom"
      : absent  ? who + " takes no part: its process on " + peer->host +
                     " is alive but busy elsewhere; the last it called in this ring is " + last_call
               : who + " takes no part: its process on " + peer->host + " answers nothing";
  return break_up({Code::kTimeout, "nothing moved for " + seconds_text(timeout_seconds_) + " at rank " +
                                       std::to_string(rank_) + " in " + here() + ": " + why});
}

// The data connection closed. Why, the control connection tells; if it tells nothing, the peer died.
Status World::peer_gone(Link* link) {
  const int64_t start = now_nanoseconds();
  do {
    TFRING_TRY(check_news());
    sleep_for_news();
  } while (seconds_between(start, now_nanoseconds()) < kLastWordsSeconds);
  std::lock_guard<std::mutex> lock(control_mutex_);
  return lose(died(*link));
}

void World::sleep_for_news() {
  pollfd fd{news_fd_.get(), POLLIN, 0};
  poll(&fd, 1, kSliceMilliseconds);
  silence_news();
}

Status World::fail(Code code, const std::string& message) {
  std::lock_guard<std::mutex> lock(control_mutex_);
  return break_up({code, message});
}

}  // namespace tfring
