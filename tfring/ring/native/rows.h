// Rows with ids: equal ids, their owners, and the sums of their rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core.h"
#include "dtype.h"
#include "memory.h"
#include "status.h"

namespace tfring {

// Returns the rank among `size` that adds up the rows of an id. Any ids are spread evenly.
int owner_of(int64_t id, int size);

// Numbers ids in the order in which they first occur.
class Distinct {
 public:
  // Clears the table and reserves room for at most this many ids.
  void begin(int64_t most);
  void number(DType type, const void* ids, int64_t count, int32_t* positions);
  // The ids numbered so far, in order.
  const int64_t* ids() const { return ids_.data(); }
  int64_t size() const { return size_; }

 private:
  template <typename Id>
  void number_as(const void* ids, int64_t count, int32_t* positions);

  std::vector<int32_t> slots_;  // positions, -1 if free
  std::vector<int64_t> ids_;
  int64_t size_ = 0;
  int shift_ = 0;
};

// Rows of one table from one source.
struct Entries {
  const char* ids = nullptr;
  const char* rows = nullptr;
  int64_t count = 0;
};

// The tables of one call, and the state of their rows:
//
//   sum_own        sums rows of this rank by id, in blocks, one for each owner of ids    to send
//   take_apart     parses blocks of other ranks                                          received
//   number         finds equal ids of several ranks, one share of the ids at a time
//   write_all      writes each id once, with the sum of its rows in the order of the ranks
//
// A block is `size, count[table]`, int64, then the ids and the rows of each table, each padded to full words.
class RowSums {
 public:
  // Reads a call's tensors: the values of each table, then the ids of each.
  static Status check(const tfring_call& call, const tfring_tensor* tensors, int num_tensors, int num_ranks);
  void begin(const tfring_tensor* tensors, int num_tensors, bool inactive);

  size_t num_tables() const { return tables_.size(); }
  const std::vector<Entries>& own() const { return own_; }
  const std::vector<int64_t>& num_own() const { return num_own_; }  // [table]: number of different ids

  // Returns false if there is no memory.
  bool sum_own(int num_owners);
  const char* blocks() const { return blocks_.get(); }
  const std::vector<int64_t>& block_sizes() const { return block_sizes_; }  // [owner]

  int64_t block_size(const int64_t* counts) const;
  // Fills entries[table]. Returns the number of bytes of the block, -1 if this is not a block.
  int64_t take_apart(const char* block, int64_t most, Entries* entries) const;

  // sources[rank][table] have the ids of one share, which no other share has.
  void number(const std::vector<Entries>& sources);
  const std::vector<int64_t>& counts() const { return counts_; }  // [share][table]
  // Returns the numbers for `allocate`: counts[share] of the rows and of the ids, then those of this rank.
  std::vector<int64_t> numbers(const std::vector<int64_t>& counts) const;
  // Writes all numbered rows to outputs: the sums of each table, share by share, then the ids of each.
  void write_all(void* const* outputs);
  // Writes shares that other ranks have added up.
  void put_together(const std::vector<Entries>& sums, void* const* outputs) const;
  // Writes a share as a block with this `size` in it. Returns false if there is no memory.
  bool write_block(size_t share, int64_t size);
  const char* block() const { return block_.get(); }

  Memory received;
  int64_t num_bytes() const { return blocks_.size() + block_.size() + received.size(); }

 private:
  struct Table {
    DType dtype;
    DType id_type;
    int64_t id_bytes;
    int64_t row_bytes;
    int64_t width;  // elements of a row
  };

  void write(size_t share, char* const* ids, char* const* rows);
  void lay_out(char* block, int64_t size, const int64_t* counts, char** ids, char** rows) const;
  void add_up(const Table& table, const Entries* sources, size_t num_sources, const int32_t* positions);

  std::vector<Table> tables_;
  std::vector<Entries> own_;  // [table]
  std::vector<int64_t> num_own_;
  Memory blocks_;
  std::vector<int64_t> block_sizes_;
  Memory block_;
  std::vector<std::vector<Entries>> shares_;  // [share][rank][table]
  std::vector<int64_t> counts_;
  std::vector<int32_t> positions_;  // of all rows, in the order of numbering
  std::vector<size_t> begins_;      // [share][table]: where its positions begin
  Distinct distinct_;
  std::vector<int32_t> owners_;    // of all ids of this rank
  std::vector<char*> id_places_;   // of a table's different ids
  std::vector<void*> row_places_;  // of the sums of their rows
  std::vector<float> wide_;        // sums of 16-bit floats
};

// Runs an all_reduce_rows without a world.
Status sum_rows(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                tfring_allocate allocate, void* context);

}  // namespace tfring
