// The C interface over World and Group: handles, error buffers, and the cleanup in a forked child.
#include "core.h"

#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "border.h"
#include "fd.h"
#include "kinds.h"
#include "process.h"
#include "trace.h"
#include "watcher.h"
#include "world.h"

namespace tfring {
namespace {

struct Handle {
  std::shared_ptr<World> world;
  std::shared_ptr<Group> group;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, Handle> handles;
  bool has_ended = false;
};
// Never destroyed: TensorFlow's threads may still call the library while the process exits. A forked child
// has its own and knows none of its parent's rings.
Registry* registry = new Registry;
std::atomic<int64_t> last_handle{0};
std::atomic<int64_t> last_parents_handle{0};

void forget_parents_worlds() {
  close_fds_in_child();
  forget_watcher_in_child();
  forget_process_in_child();
  forget_trace_in_child();
  registry = new Registry;
  last_parents_handle = last_handle.load();
}

void prepare_for_fork() {
  static const int done = pthread_atfork(hold_fds, release_fds, forget_parents_worlds);
  (void)done;
}

Handle find(int64_t handle) {
  std::lock_guard<std::mutex> lock(registry->mutex);
  const auto found = registry->handles.find(handle);
  return found == registry->handles.end() ? Handle() : found->second;
}

const char* why_unknown(int64_t handle) {
  return handle <= last_parents_handle ? "this communicator belongs to the process this one was forked from, "
                                         "and a forked child cannot use it. "
                                         "Call collectives in the parent, or connect in the child"
                                       : "this communicator is closed";
}

int64_t keep(Handle kept, tfring_error* error) {
  std::lock_guard<std::mutex> lock(registry->mutex);
  if (registry->has_ended) {
    report({Code::kPeerLost, "this process is ending, and cannot join a ring"}, error);
    return 0;
  }
  const int64_t handle = ++last_handle;
  registry->handles.emplace(handle, std::move(kept));
  return handle;
}

}  // namespace

void break_ring(uint64_t ring, const Status& why) {
  std::vector<std::shared_ptr<World>> found;
  {
    std::lock_guard<std::mutex> lock(registry->mutex);
    for (const auto& [handle, kept] : registry->handles) {
      if (kept.world->identity() == ring) found.push_back(kept.world);
    }
  }
  for (const auto& world : found) world->abort(why);
}

}  // namespace tfring

using tfring::Status;
using tfring::World;

int tfring_abi_version(void) { return TFRING_ABI_VERSION; }

int64_t tfring_open(const tfring_options* options, tfring_error* error) {
  return tfring::at_border(error, int64_t{0}, [&] {
    tfring::prepare_for_fork();
    tfring::Handle opened;
    const Status status = World::open(*options, &opened.world, &opened.group);
    return tfring::report(status, error) == TFRING_OK ? tfring::keep(std::move(opened), error) : 0;
  });
}

int64_t tfring_group(int64_t handle, const int32_t* members, int num_members, const char* name,
                     tfring_error* error) {
  return tfring::at_border(error, int64_t{0}, [&] {
    tfring::Handle made = tfring::find(handle);
    if (made.world == nullptr) {
      tfring::report({tfring::Code::kInvalid, tfring::why_unknown(handle)}, error);
      return int64_t{0};
    }
    made.group = made.world->make_group(*made.group, members, num_members, name);
    return tfring::keep(std::move(made), error);
  });
}

int tfring_add_link(int64_t handle, const tfring_link* link, tfring_error* error) {
  return tfring::at_border(error, [&] {
    const tfring::Handle found = tfring::find(handle);
    if (found.world != nullptr) return tfring::report(found.world->adopt_link(*link), error);
    const tfring::ControlFrame closed = tfring::make_control(tfring::ControlType::kClosed, -1, 0);
    const ssize_t sent = send(link->control_fd, &closed, sizeof(closed), MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)sent;
    for (int fd : {link->control_fd, link->data_fd, link->own_mailbox_fd, link->own_doorbell_fd,
                   link->mailbox_fd, link->doorbell_fd}) {
      tfring::Fd closed(fd);
    }
    delete static_cast<tfring::Tls*>(link->tls);
    return tfring::report({tfring::Code::kInvalid, tfring::why_unknown(handle)}, error);
  });
}

void tfring_close(int64_t handle) {
  tfring::at_border([&] {
    const tfring::Handle found = tfring::find(handle);
    if (found.world == nullptr) return;
    if (found.group->is_world) found.world->close();
    std::lock_guard<std::mutex> lock(tfring::registry->mutex);
    tfring::registry->handles.erase(handle);
  });
}

void tfring_end(void) {
  tfring::at_border([&] {
    std::unordered_map<int64_t, tfring::Handle> left;
    {
      std::lock_guard<std::mutex> lock(tfring::registry->mutex);
      tfring::registry->has_ended = true;
      left.swap(tfring::registry->handles);
    }
    for (const auto& [handle, kept] : left) kept.world->close();
  });
}

int tfring_failure(int64_t handle, tfring_error* error) {
  return tfring::at_border(error, [&] {
    const tfring::Handle found = tfring::find(handle);
    const int code = tfring::report(found.world == nullptr ? Status() : found.world->failure(), error);
    if (code != TFRING_OK) error->ring = found.world->identity();
    return code;
  });
}

void tfring_abort(int64_t handle, const tfring_error* why) {
  tfring::at_border([&] {
    const tfring::Handle found = tfring::find(handle);
    if (found.world != nullptr) found.world->abort(tfring::status_of(*why));
  });
}

void tfring_tell_raised(int64_t handle, const char* error) {
  tfring::at_border([&] {
    const tfring::Handle found = tfring::find(handle);
    if (found.world != nullptr) found.world->tell_raised(error);
  });
}

int tfring_next_warning(char* line, int size) {
  return tfring::at_border(0, [&] {
    const tfring::Warning warning = tfring::next_warning();
    tfring::copy_text(line, static_cast<size_t>(size), warning.line.c_str());
    return warning.with_stack ? 1 : 0;
  });
}

int tfring_get_statistics(int64_t handle, tfring_statistics* statistics) {
  const tfring::Handle found = tfring::find(handle);
  if (found.world == nullptr) return TFRING_INVALID;
  *statistics = found.world->statistics();
  return TFRING_OK;
}

int tfring_rank(int64_t handle) {
  const tfring::Handle found = tfring::find(handle);
  return found.group == nullptr ? -1 : found.group->member;
}

int tfring_world_size(int64_t handle) {
  const tfring::Handle found = tfring::find(handle);
  return found.group == nullptr ? -1 : found.group->size();
}

int tfring_run(int64_t handle, const tfring_call* call, const tfring_tensor* tensors, int num_tensors,
               const int64_t* counts, tfring_allocate allocate, void* context, tfring_error* error) {
  return tfring::at_border(error, [&] {
    const tfring::Handle found = tfring::find(handle);
    if (found.world == nullptr) {
      return tfring::report({tfring::Code::kInvalid, tfring::why_unknown(handle)}, error);
    }
    const Status status =
        found.world->run(found.group.get(), *call, tensors, num_tensors, counts, allocate, context);
    tfring::report(status, error);
    tfring::fill_text(error->call, sizeof(error->call), call->name, std::strlen(call->name));
    if (!status.ok() && status.code != tfring::Code::kInvalid) error->ring = found.world->identity();
    return static_cast<int>(error->code);
  });
}

const char* tfring_kind_name(int kind) {
  return kind >= 0 && kind < tfring::kNumKinds ? tfring::kKinds[kind].name : nullptr;
}

int tfring_sum_rows(const tfring_call* call, const tfring_tensor* tensors, int num_tensors,
                    tfring_allocate allocate, void* context, tfring_error* error) {
  return tfring::at_border(error, [&] {
    return tfring::report(tfring::sum_rows(*call, tensors, num_tensors, allocate, context), error);
  });
}

void* tfring_tls_open(const char* library, int data_fd, int accepts, const void* key, double seconds,
                      tfring_error* error) {
  return tfring::at_border(error, static_cast<void*>(nullptr), [&] {
    std::unique_ptr<tfring::Tls> opened;
    tfring::report(tfring::Tls::open(library, data_fd, accepts != 0, static_cast<const unsigned char*>(key),
                                     seconds, &opened),
                   error);
    return static_cast<void*>(opened.release());
  });
}

void tfring_tls_close(void* tls) { delete static_cast<tfring::Tls*>(tls); }

void tfring_send_abort(int control_fd, const tfring_error* why) {
  tfring::at_border([&] {
    const tfring::ControlFrame frame = tfring::make_abort(0, tfring::status_of(*why));
    const ssize_t sent = send(control_fd, &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)sent;  // nothing was written to this connection before
  });
}

void tfring_chunk(int64_t count, int world_size, int index, int64_t* begin, int64_t* end) {
  const tfring::Range range = tfring::chunk_of(count, world_size, index);
  *begin = range.begin;
  *end = range.end();
}

int tfring_is_small(int64_t num_bytes, int world_size) {
  return tfring::is_small(num_bytes, world_size) ? 1 : 0;
}

int tfring_choose(int algorithm, int64_t num_bytes, int size, int local_size) {
  return static_cast<int>(
      tfring::choose_all_reduce(static_cast<tfring::Algorithm>(algorithm), num_bytes, size, local_size));
}

int tfring_choose_rooted(int64_t num_bytes, int size) {
  return static_cast<int>(tfring::choose_rooted(num_bytes, size));
}

int tfring_choose_row_sums(int wanted, int64_t sent, int64_t summed, int size) {
  return static_cast<int>(
      tfring::choose_row_sums(static_cast<tfring::Algorithm>(wanted), sent, summed, size));
}

int tfring_schedule(const char* which, int position, int size, int more, int32_t (*table)[5], int max_steps) {
  return tfring::at_border(-1, [&] {
    const std::string name = which;
    tfring::Schedule steps;
    if (name == "ring_all_reduce") tfring::ring_all_reduce(position, size, &steps);
    if (name == "ring_all_gather") tfring::ring_all_gather(position, size, &steps);
    if (name == "ring_reduce_scatter") tfring::ring_reduce_scatter(position, size, &steps);
    if (name == "ring_broadcast") tfring::ring_broadcast(position, size, more, &steps);
    if (name == "ring_reduce") tfring::ring_reduce(position, size, more, &steps);
    if (name == "tree_broadcast") tfring::tree_broadcast(position, size, more, &steps);
    if (name == "tree_reduce") tfring::tree_reduce(position, size, more, &steps);
    if (name == "flat_all_gather") tfring::flat_all_gather(position, size, &steps);
    if (name == "flat_broadcast") tfring::flat_broadcast(position, size, more, &steps);
    if (name == "bruck_all_gather") tfring::bruck_all_gather(position, size, &steps);
    if (name == "halving_all_reduce") tfring::halving_all_reduce(position, size, &steps);
    if (name == "two_level_all_reduce") tfring::two_level_all_reduce(position, size, more, &steps);
    const int num_steps = static_cast<int>(steps.size());
    for (int s = 0; s < std::min(num_steps, max_steps); ++s) {
      const tfring::ScheduleStep& step = steps[static_cast<size_t>(s)];
      const int32_t row[5] = {step.to, step.send, step.from, step.recv, step.reduce ? 1 : 0};
      std::copy(row, row + 5, table[s]);
    }
    return num_steps;
  });
}

int tfring_partners(int position, int size, int local_size, int32_t* positions) {
  return tfring::at_border(-1, [&] {
    const std::vector<int> found = tfring::partners(position, size, local_size);
    std::copy(found.begin(), found.end(), positions);
    return static_cast<int>(found.size());
  });
}
