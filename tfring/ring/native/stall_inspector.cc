// Distinguishes ranks that are slow from ranks that wait for each other.
#include "stall_inspector.h"

#include <algorithm>

#include "clock.h"
#include "process.h"

namespace tfring {
namespace {

constexpr double kSliceSeconds = 0.1;      // within which a waiting rank asks once it is time
constexpr double kAskSeconds = 1.0;        // between questions to the peers, at most
constexpr double kFirstAskSeconds = 0.25;  // until the first question
constexpr double kRaisedSeconds = 3.0;     // for this rank to raise an error like its peer
constexpr double kIdleShare = 0.03;        // share of a processor that a process uses while it only waits

}  // namespace

StallInspector::StallInspector(const Settings& settings, const Call& call, const Plan& plan,
                               Guarded<Liveness>* liveness)
    : settings_(settings), call_(call), plan_(plan), liveness_(*liveness) {}

void StallInspector::stand_still(bool stands) {
  if (stands == stands_still_) return;
  stands_still_ = stands;
  liveness_.lock()->tell_stands_still(stands);
  if (!call_.is_of_all) return;
  stands ? stands_still(settings_.identity, call_.is_on_pool_thread)
         : moves_again(settings_.identity, call_.is_on_pool_thread);
}

bool StallInspector::is_pending(int rank) const {
  return std::any_of(plan_.queues.begin(), plan_.queues.end(),
                     [&](const Queue& queue) { return queue.rank == rank && plan_.is_pending(queue); });
}

// Returns the rank that this one waits for, -1 for none: one that should send data, otherwise one that should
// receive.
int StallInspector::awaited(bool* for_data) const {
  for (const Queue& queue : plan_.queues) {
    if (plan_.may_receive(queue)) {
      *for_data = true;
      return queue.rank;
    }
  }
  *for_data = false;
  for (const Queue& queue : plan_.queues) {
    if (plan_.sendable(queue) > 0) return queue.rank;
  }
  return -1;
}

// Returns whether this rank reports the one it waits for. If all members of a group wait for the same one, as
// in a flat plan, only the lowest reports it.
bool StallInspector::reports_stall(int slow) const {
  const size_t others = static_cast<size_t>(call_.group->size() - 1);
  const bool each_to_each =
      plan_.queues.size() == others &&
      std::all_of(plan_.queues.begin(), plan_.queues.end(), [](const Queue& queue) { return queue.expects; });
  const bool from_one = plan_.queues.size() == 1 && !is_pairwise(call_.kind());
  if (!each_to_each && !from_one) return true;
  return std::all_of(call_.group->ranks.begin(), call_.group->ranks.end(),
                     [&](int rank) { return rank == slow || rank >= settings_.rank; });
}

// No bytes move. The peers that this rank waits for report the call they are in. If it is the same, or one
// without this rank, they wait like this rank, and the rank next to the one that stands still will handle it.
// A peer that does not answer is handled by the watcher (liveness.cc).
Status StallInspector::inspect(int64_t now, int64_t idle_since, double timeout_seconds) {
  crosses_ = false;
  const Status status = ask(now, idle_since, timeout_seconds);
  if (crosses_) break_ring(elsewhere_, status);  // the ring in which the peer waits
  return status;
}

Status StallInspector::ask(int64_t now, int64_t idle_since, double timeout_seconds) {
  const double idle_seconds = seconds_between(idle_since, now);
  const double most = std::min({kAskSeconds, timeout_seconds / 4, settings_.stall_seconds / 4});
  const double period = std::min(most, std::max(kFirstAskSeconds, idle_seconds / 2));
  if (idle_seconds < period) return {};
  stand_still(true);
  const auto liveness = liveness_.lock();
  ++num_asks_;
  const bool needs_all = !is_pairwise(call_.kind());
  for (int i = 0; i < settings_.world_size; ++i) {
    const int rank = (i + num_asks_) % settings_.world_size;
    Peer* asked = liveness->peer(rank);
    if (asked == nullptr || !liveness->calls().takes_part(rank) || !(needs_all || is_pending(rank))) continue;
    liveness->ask(asked, now, period);
    if (asked->answered > idle_since) TFRING_TRY(liveness->compare_calls(*asked));
  }
  bool for_data = false;
  const int rank = awaited(&for_data);
  if (rank < 0) return {};
  const Peer* peer = liveness->peer(rank);
  const Pong& pong = peer->report.pong;
  const std::string who = "rank " + std::to_string(rank);
  const std::string last_call = describe(pong.header);
  const double age = seconds_between(peer->answered, now);  // age of its report
  const bool answers = peer->answered > idle_since && age < 2 * period + kSliceSeconds;
  const bool waits_too = answers && (liveness->calls().has_begun(rank, peer->report) || pong.is_running != 0);
  const bool absent = answers && !waits_too;

  if (absent && call_.is_on_pool_thread && age < period && wait_for_each_other(pong)) {
    return liveness->break_up(
        {Code::kMismatch,
         "rank " + std::to_string(settings_.rank) + " and " + who +
             " wait for each other in different rings: all inter-op threads of rank " +
             std::to_string(settings_.rank) + " wait, one of them in " + here() + ", those of " + who +
             " in others (" + last_call +
             " is its last call of this ring). Run the rings' collectives in one order: from one "
             "tf.function, or from one Python thread; or give TensorFlow a thread for each: "
             "tf.config.threading.set_inter_op_parallelism_threads(n)",
         Reason::kThreads, rank, settings_.rank});
  }
  if (absent && idle_seconds > kRaisedSeconds && liveness->has_raised(*peer)) {
    return liveness->lose_to_its_error(*peer);
  }
  if (absent) TFRING_TRY(wait_crosswise(liveness, *peer, now, idle_since));
  const bool is_crosswise = absent && seconds_between(elsewhere_since_, now) > idle_seconds / 4 &&
                            elsewhere_since_ > idle_since;  // an error is on its way
  if (absent && for_data && !is_warned_ && !is_crosswise && idle_seconds > settings_.stall_seconds) {
    is_warned_ = true;
    if (reports_stall(rank)) {
      liveness->peer(rank)->send(make_control(ControlType::kAwaited, settings_.rank, 0));
      warn(peer->name() + " is slow: all ranks have waited for it for " + seconds_text(idle_seconds) +
           " in " + here() + ". It is alive, and its last call in this ring is " + last_call +
           ". They keep waiting, up to " + seconds_text(timeout_seconds) +
           " (TFRING_TIMEOUT_SECONDS). Its own output shows where its program is.");
    }
  }
  const double grace = std::min(std::max(0.1 * timeout_seconds, 0.25), 5.0);
  const double over = idle_seconds - timeout_seconds;
  if (over < (waits_too ? 10 * grace : grace)) return {};
  const std::string why =
      waits_too ? who + " waits as well, in " + last_call + ", and no rank reports for which rank"
      : absent  ? who + " takes no part: its process on " + peer->host +
                     " is alive but busy elsewhere; its last call in this ring is " + last_call
               : who + " takes no part: its process on " + peer->host + " does not answer";
  return liveness->break_up({Code::kTimeout,
                             "nothing moved for " + seconds_text(timeout_seconds) + " at rank " +
                                 std::to_string(settings_.rank) + " in " + here() + ": " + why,
                             Reason::kSlow, rank});
}

// The peer has not begun this rank's collective, and its process waits in another ring, in a collective that
// this process has not begun. Either may have a thread that still computes, and then begins the collective
// that the other waits for. But if neither uses a processor for the time after which a slow rank is warned
// of, they disagree.
Status StallInspector::wait_crosswise(const Guarded<Liveness>::Locked& liveness, const Peer& peer,
                                      int64_t now, int64_t idle_since) {
  const uint64_t other = call_.is_of_all ? waits_elsewhere(peer.report.pong) : 0;
  const bool is_open = elsewhere_since_ > idle_since;
  const double seconds = is_open ? seconds_between(elsewhere_since_, now) : 0;
  const int64_t used[2] = {cpu_nanoseconds(), peer.report.pong.cpu_nanoseconds};
  const auto computes = [&](int process) {
    return static_cast<double>(used[process] - used_[process]) * 1e-9 > kIdleShare * (1 + seconds);
  };
  if (other == 0) {
    elsewhere_since_ = 0;
    return {};
  }
  if (!is_open || other != elsewhere_ || computes(0) || computes(1)) {
    elsewhere_ = other;
    elsewhere_since_ = now;
    std::copy_n(used, 2, used_);
  }
  if (seconds_between(elsewhere_since_, now) < settings_.stall_seconds) return {};
  crosses_ = true;
  const std::string who = "rank " + std::to_string(peer.rank);
  const std::string me = "rank " + std::to_string(settings_.rank);
  return liveness->break_up(
      {Code::kMismatch,
       "ranks disagree: " + who + " and " + me +
           " wait for each other in different rings, and neither computes: " + me + " in " + here() + ", " +
           who + " in ring \"" + name_of_ring(elsewhere_) + "\"; its last call in ring \"" + settings_.name +
           "\" is " + describe(peer.report.pong.header) +
           ". All ranks must call the collectives of all rings in one order. They do not if a "
           "condition around an update (tf.cond) depends on a replica's own value, or if one "
           "catches an error that the others do not get",
       Reason::kCallsDiffer, peer.rank, settings_.rank});
}

}  // namespace tfring
