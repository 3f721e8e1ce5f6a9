// The C interface over Ring: handles, error buffers; what a forked child forgets.
#include "core.h"

#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <unordered_map>

#include "fd.h"
#include "process.h"
#include "ring.h"
#include "watcher.h"

namespace tfring {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<Ring>> rings;
};
// Never destroyed: TensorFlow's threads may still call in while the process exits. A forked child has one of
// its own and knows none of its parent's rings.
Registry* registry = new Registry;
std::atomic<int64_t> last_handle{0};
std::atomic<int64_t> last_parents_handle{0};

void forget_parents_rings() {
  close_fds_in_child();
  forget_watcher_in_child();
  forget_process_in_child();
  registry = new Registry;
  last_parents_handle = last_handle.load();
}

void prepare_for_fork() {
  static const int done = pthread_atfork(hold_fds, release_fds, forget_parents_rings);
  (void)done;
}

std::shared_ptr<Ring> find(int64_t handle) {
  std::lock_guard<std::mutex> lock(registry->mutex);
  const auto found = registry->rings.find(handle);
  return found == registry->rings.end() ? nullptr : found->second;
}

const char* why_unknown(int64_t handle) {
  return handle <= last_parents_handle ? "this communicator belongs to the process this one was forked from, "
                                         "and a forked child cannot use it. "
                                         "Call collectives in the parent, or connect in the child"
                                       : "this communicator is closed";
}

int report(const Status& status, tfring_error* error) {
  error->code = static_cast<int32_t>(status.code);
  const size_t length = std::min(status.message.size(), sizeof(error->message) - 1);
  std::memcpy(error->message, status.message.data(), length);
  error->message[length] = '\0';
  return error->code;
}

template <typename Body>
int with_ring(int64_t handle, tfring_error* error, Body body) {
  const std::shared_ptr<Ring> ring = find(handle);
  if (ring == nullptr) return report({Code::kInvalid, why_unknown(handle)}, error);
  return report(body(*ring), error);
}

}  // namespace
}  // namespace tfring

using tfring::Ring;
using tfring::Status;

int tfring_abi_version(void) { return TFRING_ABI_VERSION; }

int64_t tfring_open(const tfring_options* options, tfring_error* error) {
  tfring::prepare_for_fork();
  std::shared_ptr<Ring> ring;
  if (tfring::report(Ring::open(*options, &ring), error) != TFRING_OK) return 0;
  std::lock_guard<std::mutex> lock(tfring::registry->mutex);
  const int64_t handle = ++tfring::last_handle;
  tfring::registry->rings.emplace(handle, std::move(ring));
  return handle;
}

void tfring_close(int64_t handle) {
  const std::shared_ptr<Ring> ring = tfring::find(handle);
  if (ring == nullptr) return;
  ring->close();
  std::lock_guard<std::mutex> lock(tfring::registry->mutex);
  tfring::registry->rings.erase(handle);
}

int tfring_failure(int64_t handle, tfring_error* error) {
  const std::shared_ptr<Ring> ring = tfring::find(handle);
  return tfring::report(ring == nullptr ? Status() : ring->failure(), error);
}

void tfring_abort(int64_t handle, int code, const char* message) {
  const std::shared_ptr<Ring> ring = tfring::find(handle);
  if (ring != nullptr) ring->abort({static_cast<tfring::Code>(code), message});
}

void tfring_next_warning(char* line, int size) {
  tfring::copy_text(line, static_cast<size_t>(size), tfring::next_warning().c_str());
}

int tfring_get_statistics(int64_t handle, tfring_statistics* statistics) {
  const std::shared_ptr<Ring> ring = tfring::find(handle);
  if (ring == nullptr) return TFRING_INVALID;
  *statistics = ring->statistics();
  return TFRING_OK;
}

int tfring_rank(int64_t handle) {
  const std::shared_ptr<Ring> ring = tfring::find(handle);
  return ring == nullptr ? -1 : ring->rank();
}

int tfring_world_size(int64_t handle) {
  const std::shared_ptr<Ring> ring = tfring::find(handle);
  return ring == nullptr ? -1 : ring->world_size();
}

int tfring_all_reduce(int64_t handle, const tfring_call* call, const tfring_tensor* tensors, int num_tensors,
                      tfring_error* error) {
  return tfring::with_ring(handle, error,
                           [&](Ring& ring) { return ring.all_reduce(*call, tensors, num_tensors); });
}

int tfring_all_gather(int64_t handle, const tfring_call* call, const tfring_tensor* tensors, int num_tensors,
                      tfring_place place, void* context, tfring_error* error) {
  return tfring::with_ring(handle, error, [&](Ring& ring) {
    return ring.all_gather(*call, tensors, num_tensors, place, context);
  });
}

int tfring_reduce_scatter(int64_t handle, const tfring_call* call, const tfring_tensor* tensor,
                          tfring_error* error) {
  return tfring::with_ring(handle, error, [&](Ring& ring) { return ring.reduce_scatter(*call, *tensor); });
}

int tfring_broadcast(int64_t handle, const tfring_call* call, const tfring_tensor* tensors, int num_tensors,
                     tfring_error* error) {
  return tfring::with_ring(handle, error,
                           [&](Ring& ring) { return ring.broadcast(*call, tensors, num_tensors); });
}

int tfring_barrier(int64_t handle, const tfring_call* call, tfring_error* error) {
  return tfring::with_ring(handle, error, [&](Ring& ring) { return ring.barrier(*call); });
}

void tfring_send_abort(int control_fd, int rank, int code, const char* message) {
  const tfring::ControlFrame frame =
      tfring::make_control(tfring::ControlType::kAbort, rank, 0, static_cast<tfring::Code>(code), message);
  const ssize_t sent = send(control_fd, &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT);
  (void)sent;
}

void tfring_chunk(int64_t count, int world_size, int index, int64_t* begin, int64_t* end) {
  const tfring::Range range = tfring::chunk_of(count, world_size, index);
  *begin = range.begin;
  *end = range.end();
}

int tfring_is_small(int64_t num_bytes, int world_size) {
  return tfring::is_small(num_bytes, world_size) ? 1 : 0;
}

int tfring_schedule(const char* which, int rank, int world_size, int root, int32_t (*table)[3],
                    int max_steps) {
  const std::string name = which;
  const int num_steps = name == "all_reduce"       ? tfring::num_all_reduce_steps(world_size)
                        : name == "all_gather"     ? tfring::num_all_gather_steps(world_size)
                        : name == "reduce_scatter" ? tfring::num_reduce_scatter_steps(world_size)
                        : name == "broadcast"      ? tfring::num_broadcast_steps()
                                                   : -1;
  for (int s = 0; s < std::min(num_steps, max_steps); ++s) {
    const tfring::ScheduleStep step = name == "all_reduce"   ? tfring::all_reduce_step(rank, world_size, s)
                                      : name == "all_gather" ? tfring::all_gather_step(rank, world_size, s)
                                      : name == "reduce_scatter"
                                          ? tfring::reduce_scatter_step(rank, world_size, s)
                                          : tfring::broadcast_step(rank, world_size, root, s);
    table[s][0] = step.send;
    table[s][1] = step.recv;
    table[s][2] = step.reduce ? 1 : 0;
  }
  return num_steps;
}
