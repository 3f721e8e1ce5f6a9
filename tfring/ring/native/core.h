// The C interface of the engine, for ctypes and the TensorFlow ops.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TFRING_API __attribute__((visibility("default")))
#define TFRING_ABI_VERSION 17
#define TFRING_MOST_KINDS 32

// Codes of tfring_error; 0 is success.
enum {
  TFRING_OK = 0,
  TFRING_MISMATCH = 1,
  TFRING_PEER_LOST = 2,
  TFRING_TIMEOUT = 3,
  TFRING_INVALID = 4,
  TFRING_INTERRUPTED = 5,
  TFRING_INTERNAL = 6,
};

// Values of tfring_error.reason. Errors that Python makes use further values (errors.py).
enum {
  TFRING_NO_REASON = 0,
  TFRING_DIED = 1,         // `rank`: its process is gone
  TFRING_LEFT = 2,         // its program ended and left the ring
  TFRING_CLOSED = 3,       // it closed the ring during a call
  TFRING_CTRL_C = 4,       // it was interrupted
  TFRING_STOPPED = 5,      // its host answers, its process does not
  TFRING_CUT_OFF = 6,      // it and `other` cannot reach each other
  TFRING_RAISED = 7,       // its program raised an error
  TFRING_STEP_FAILED = 8,  // another operation of its step failed
  TFRING_CALLS_DIFFER = 9,
  TFRING_THREADS = 10,  // two threads in one call, or all threads in calls of other rings
  TFRING_SLOW = 11,     // it did not take part in time
};

// Values of tfring_call.caller.
enum {
  TFRING_ANY_THREAD = 0,
  TFRING_PYTHON_MAIN_THREAD = 1,  // signal handlers run while it waits
  TFRING_TENSORFLOW_OP = 2,       // Python's main thread waits for TensorFlow, and no handler runs
};

typedef struct tfring_error {
  int32_t code;
  int32_t reason;
  int32_t rank;    // the rank concerned, -1 for none
  int32_t other;   // the other rank of a cut link, otherwise -1
  uint64_t ring;   // identity of the broken ring, otherwise 0
  char call[104];  // the name of this rank's call, truncated
  char message[1920];
} tfring_error;

// One tensor of a collective. `input` and `output` may be the same memory.
typedef struct tfring_tensor {
  const void* input;
  void* output;
  const int64_t* dims;
  int32_t num_dims;
  int32_t dtype;
} tfring_tensor;

typedef struct tfring_call {
  const char* name;
  int32_t kind;         // of kinds.h
  int32_t op;           // for a sum of rows: its algorithm, as in schedule.h
  int32_t root;         // a member of the group; for a send or receive, the peer
  int32_t inactive;     // 1: contribute zeros, whatever the inputs hold
  int32_t caller;       // the caller that waits; determines how Ctrl-C is noticed
  int32_t compression;  // for an all_reduce of float32: the 16-bit dtype that is sent, 0 for float32
  int64_t of;           // for a gradient's call: the sequence number of the call it belongs to; 0 for none
  uint64_t* sequence;   // set to the sequence number of this call, unless null
} tfring_call;

// The connections between two ranks. A world owns the descriptors and `tls` once a function gets them,
// whatever it returns.
typedef struct tfring_link {
  int32_t rank;
  int32_t control_fd;
  int32_t data_fd;          // -1 if shared memory carries the data; otherwise the mailboxes are -1
  int32_t own_mailbox_fd;   // the peer writes into it
  int32_t own_doorbell_fd;  // and rings this doorbell
  int32_t mailbox_fd;       // the peer's mailbox
  int32_t doorbell_fd;      // and its doorbell
  const char* host;         // the host of the peer, for messages
  void* tls;                // of tfring_tls_open, null if the data is not encrypted
} tfring_link;

typedef struct tfring_options {
  const char* name;
  const char* host;   // the host of this rank, for messages
  uint64_t identity;  // the same on all ranks
  int32_t rank;
  int32_t world_size;
  const tfring_link* links;
  int32_t num_links;
  int32_t algorithm;               // of schedule.h, the same on all ranks
  const int32_t* hosts;            // [world_size]: a number for the host of each rank, the same on all ranks
  int32_t num_spins;               // polls of shared memory before a rank sleeps
  double timeout_seconds;          // time that a collective waits for a rank that is alive but stands still
  double stall_seconds;            // time after which such a wait logs a warning
  double lost_seconds;             // time that a rank may give no sign of life
  double opening_timeout_seconds;  // time that the first barrier waits for all ranks to be connected
} tfring_options;

typedef struct tfring_statistics {
  int64_t bytes_sent;
  int64_t bytes_received;
  double seconds_waited;
  int64_t collectives[TFRING_MOST_KINDS];  // by kind
  int64_t scratch_bytes;                   // memory held in addition to the caller's
} tfring_statistics;

// A record of one call, or a mark. Times are nanoseconds of CLOCK_MONOTONIC.
#define TFRING_MARK 255
typedef struct tfring_record {
  int64_t begin;
  int64_t end;
  int64_t waited;  // until the last peer's header arrived, without arithmetic in the meantime
  int64_t added;   // time of arithmetic; in the remaining time bytes were in transit
  int64_t beside;  // CPU time of this process's other threads in the meantime; 0 below 4 KiB
  int64_t bytes;   // of this rank's tensors
  int64_t sent;
  int64_t received;
  uint64_t sequence;  // as in the header
  int32_t kind;       // of kinds.h, or TFRING_MARK
  int32_t algorithm;  // of an all_reduce, a sum of rows or an all_gather among many ranks, as in schedule.h
  int32_t last;       // the rank with the last header, -1 for none
  int32_t code;       // the code of its result
  char ring[24];      // truncated, as are the others
  char group[24];     // empty for all ranks
  char name[104];
} tfring_record;

TFRING_API int tfring_abi_version(void);

// CPython's functions of these names, so that Ctrl-C works while a collective waits without the GIL; and a
// function that returns whether SIGINT would raise KeyboardInterrupt, which may be called without the GIL.
typedef struct tfring_python {
  int (*gil_state_ensure)(void);
  void (*gil_state_release)(int);
  void* (*gil_state_get_this_thread_state)(void);
  int (*err_check_signals)(void);
  void (*err_fetch)(void**, void**, void**);
  void (*err_restore)(void*, void*, void*);
  int (*add_pending_call)(int (*)(void*), void*);
  int (*interrupt_raises)(void);
} tfring_python;
TFRING_API void tfring_use_python(const tfring_python* functions);
// Sets the exception that the signal handler raised, if it ran within the collective. To be called after
// TFRING_INTERRUPTED on Python's main thread, with the GIL held.
TFRING_API void tfring_raise_again(void);

// Sets a function for this thread's calls as TFRING_TENSORFLOW_OP. Once it returns 1, the call stops waiting
// and breaks the ring. Null unsets it.
TFRING_API void tfring_set_cancellation(int32_t (*is_cancelled)(void* context), void* context);

// Sets the number of threads in TensorFlow's inter-op pool.
TFRING_API void tfring_set_pool_size(int num_threads);

// Waits for the next line that the user should read. Returns 1 if it should include the program's stack.
TFRING_API int tfring_next_warning(char* line, int size);

// Starts to record calls of all rings of this process, up to `capacity` of them between two reads; 0 stops
// it. Discards earlier records.
TFRING_API void tfring_trace(int64_t capacity);
// Takes the oldest records, at most `most`, and returns their number. *lost is the number of records so far
// that had no room.
TFRING_API int64_t tfring_take_records(tfring_record* to, int64_t most, int64_t* lost);
// Records a mark: the program has come to this point.
TFRING_API void tfring_mark(const char* name);

// Returns a handle above 0 for the group of all ranks, or 0 with `error` filled.
TFRING_API int64_t tfring_open(const tfring_options* options, tfring_error* error);
// Returns a handle for some of a group's members, which are numbered from 0 in this order. Sends nothing.
TFRING_API int64_t tfring_group(int64_t handle, const int32_t* members, int num_members, const char* name,
                                tfring_error* error);
// Adds a link, possibly while another thread runs a call. Takes over its descriptors, even if it fails.
TFRING_API int tfring_add_link(int64_t handle, const tfring_link* link, tfring_error* error);
// Sends the peers a closing frame and forgets the handle; for a group, it only forgets the handle. Calls that
// still run fail.
TFRING_API void tfring_close(int64_t handle);
// Closes all worlds and lets none open again: no call then asks a caller that is about to end for memory.
TFRING_API void tfring_end(void);
// Breaks a world on all ranks for a reason outside it, such as the failure of another world.
TFRING_API void tfring_abort(int64_t handle, const tfring_error* why);
// Tells the peers about an error of the program. Peers without an error that wait for this rank give up.
TFRING_API void tfring_tell_raised(int64_t handle, const char* error);
// Returns the code of the first failure, after which all calls fail; 0 if there was none.
// TFRING_INTERRUPTED is a lost peer for the other ranks.
TFRING_API int tfring_failure(int64_t handle, tfring_error* error);
TFRING_API int tfring_get_statistics(int64_t handle, tfring_statistics* statistics);
// Both refer to the group.
TFRING_API int tfring_rank(int64_t handle);
TFRING_API int tfring_world_size(int64_t handle);

// Allocates memory for a call with sizes that become known on the way: called once, on this thread, when they
// are known. Rank r sends numbers[r * num_tensors + t] rows of tensor t. The function must set outputs[t] to
// the memory for all of them, in rank order, and then *placed to 1. For a receive the numbers are the
// dimensions. If *placed remains 0, the call fails on all ranks, on this one with TFRING_INTERRUPTED.
// TFRING_UNWANTED means that a receive expects another shape.
#define TFRING_UNWANTED 2
typedef void (*tfring_allocate)(void* context, const int64_t* numbers, int32_t count, void** outputs,
                                int32_t* placed);
// Runs the collective, send or receive of call->kind. Reduced tensors must have one dtype. Shapes must be the
// same on all ranks, except for numbers of rows that are learned on the way. `counts` and `allocate` are null
// for kinds that do not need them.
TFRING_API int tfring_run(int64_t handle, const tfring_call* call, const tfring_tensor* tensors,
                          int num_tensors, const int64_t* counts, tfring_allocate allocate, void* context,
                          tfring_error* error);
// Sums rows with equal ids like an all_reduce_rows, for this process only.
TFRING_API int tfring_sum_rows(const tfring_call* call, const tfring_tensor* tensors, int num_tensors,
                               tfring_allocate allocate, void* context, tfring_error* error);
// Returns the name of a kind; null if the number is not a kind.
TFRING_API const char* tfring_kind_name(int kind);

// Encrypts a data connection by TLS 1.3, see tls.h. Both sides must call it before anything is sent. `key`
// has 32 bytes. Returns the `tls` of a tfring_link, or null with `error` filled.
TFRING_API void* tfring_tls_open(const char* library, int data_fd, int accepts, const void* key,
                                 double seconds, tfring_error* error);
TFRING_API void tfring_tls_close(void* tls);
// Tells a peer that this rank gives up, over a control connection that no world owns yet.
TFRING_API void tfring_send_abort(int control_fd, const tfring_error* why);

// The schedules, and the choice between them.
TFRING_API void tfring_chunk(int64_t count, int world_size, int index, int64_t* begin, int64_t* end);
TFRING_API int tfring_is_small(int64_t num_bytes, int world_size);
TFRING_API int tfring_choose(int algorithm, int64_t num_bytes, int size, int local_size);
TFRING_API int tfring_choose_rooted(int64_t num_bytes, int size);
TFRING_API int tfring_choose_row_sums(int wanted, int64_t sent, int64_t summed, int size);
// Fills table[step] = {to, send, from, recv, reduce}, -1 for none. Returns the number of steps. `more` is the
// root, or the number of members on a host.
TFRING_API int tfring_schedule(const char* which, int position, int size, int more, int32_t (*table)[5],
                               int max_steps);
// Fills `positions` with those that exchange messages with `position`. Returns their number.
TFRING_API int tfring_partners(int position, int size, int local_size, int32_t* positions);

// Computes Adam's update (Kingma and Ba 2015) of `count` float32 or float64 elements. `scalars` are the step
// size alpha, 1 - beta_1, 1 - beta_2 and epsilon. `from` and `to` are the momentum, the velocity and the
// weight before and after, which may be the same memory.
TFRING_API void tfring_adam(int dtype, const void* scalars, const void* gradients, const void* const* from,
                            void* const* to, int64_t count);
// Computes the update of tfring_adam for a table of `num_rows` rows of `width` elements. `count` rows have a
// gradient, each once; the gradient of the others is zero. `id_type` is int32 or int64. Returns 0 if an id
// occurs twice or is not a row of the table, -1 if there is no memory; nothing is written then.
TFRING_API int tfring_adam_rows(int dtype, const void* scalars, const void* gradients, int id_type,
                                const void* ids, int64_t count, int64_t num_rows, int64_t width,
                                const void* const* from, void* const* to);

// The arithmetic only (kernels.h), for tests and benchmarks. Instructions are "plain", "avx2" or "avx512".
// Returns 0 if this processor does not support them.
TFRING_API int tfring_use_instructions(const char* name);
TFRING_API void tfring_reduce_two(int dtype, int op, void* out, const void* a, const void* b, int64_t count);
TFRING_API void tfring_reduce_many(int dtype, int op, void* out, const void* const* parts, int num_parts,
                                   int64_t count);

#ifdef __cplusplus
}
#endif
