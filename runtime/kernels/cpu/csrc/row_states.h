// Recurrent state of the rows of a batch: the snapshots and inputs that each row reads and writes.
// `ops/row_states.py` explains them.
//
// Everything that a step reads it never writes, so a unit of work may be computed again. What it
// writes must be published once: an entry may belong to another sequence after the step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <c10/util/Exception.h>

namespace stepgraph {

// As `RowStates` in `ops/batch.py`.
struct RowStates {
  uint8_t* snapshots;  // [num_snapshots, snapshot_bytes]
  int64_t num_snapshots, snapshot_bytes;
  uint8_t* inputs;  // [num_blocks, input_bytes]
  int64_t num_blocks, input_bytes;
  const int32_t *snapshot_tables, *input_tables;  // [rows, columns]
  const int64_t* stored;                          // [rows]
  int64_t rows, columns, block_size;
};

// Consecutive tokens of one row of a batch.
//
// Its tokens are numbered from the start of the block whose snapshot it reads, the base: the block
// of its first token, or the one before if the snapshot of that block is not stored yet. Tokens of
// the base block before the first one have their inputs in memory.
struct StateRun {
  int64_t first, count;  // tokens of the batch
  int64_t base;          // column of the base block
  int64_t offset;        // number of the first token
  int64_t columns;       // from the base block to the block of the last token
  int64_t entries;       // where the entries of these columns begin in the plan

  int64_t end() const { return offset + count; }
};

// Which memory the rows of a step use: made before the threads start, the same for all layers. It
// copies the tables, which the next step may change while a late thread reads them.
class StatePlan {
 public:
  std::vector<StateRun> runs;
  std::vector<int64_t> padding;  // tokens that belong to no run
  int64_t block_size = 1;
  int64_t most_tokens = 0;     // of a run, with earlier ones since the base
  int64_t most_snapshots = 0;  // that a run stores

  // Raises IndexError for a row or an entry that is out of range.
  void prepare(const RowStates& states, const int64_t* positions, const int64_t* token_rows,
               int64_t tokens) {
    states_ = states;
    block_size = states.block_size;
    runs.clear();
    padding.clear();
    entries_.clear();
    most_tokens = most_snapshots = 0;
    const int64_t null_row = states.rows - 1;
    for (int64_t first = 0, next; first < tokens; first = next) {
      const int64_t row = token_rows[first], position = positions[first];
      next = first + 1;
      if (row == null_row) {
        padding.push_back(first);
        continue;
      }
      while (next < tokens && token_rows[next] == row &&
             positions[next] == position + (next - first)) {
        ++next;
      }
      add_run(row, first, next - first, position);
      // What does not follow is a draft beyond the last one of the row.
      for (; next < tokens && token_rows[next] == row; ++next) padding.push_back(next);
    }
  }

  // The snapshot of the base block, or null: the state is zero.
  const uint8_t* state(const StateRun& run) const {
    if (run.base == 0) return nullptr;
    return states_.snapshots + entries_[run.entries].snapshot * states_.snapshot_bytes;
  }

  // Where the snapshot of a column after the base goes, counted from it; null: it is not stored.
  uint8_t* snapshot(const StateRun& run, int64_t column) const {
    const int64_t entry = entries_[run.entries + column].snapshot;
    return entry == 0 ? nullptr : states_.snapshots + entry * states_.snapshot_bytes;
  }

  // The inputs of a block, counted from the base; null: they are not kept.
  uint8_t* inputs(const StateRun& run, int64_t column) const {
    const int64_t entry = entries_[run.entries + column].inputs;
    return entry == 0 ? nullptr : states_.inputs + entry * states_.input_bytes;
  }

 private:
  struct Entries {
    int32_t snapshot, inputs;
  };

  void add_run(int64_t row, int64_t first, int64_t count, int64_t position) {
    TORCH_CHECK_INDEX(0 <= row && row < states_.rows, "token_rows[", first, "] is ", row,
                      ", outside 0 ... ", states_.rows - 1);
    const int64_t column = position / block_size, last = (position + count - 1) / block_size;
    TORCH_CHECK_INDEX(0 <= position && last < states_.columns, "positions[", first, "] is ",
                      position, ", outside the ", states_.columns, " blocks of the tables");
    StateRun run{first, count, states_.stored[row] < column ? column - 1 : column};
    run.offset = position - run.base * block_size;
    run.columns = last - run.base + 1;
    run.entries = static_cast<int64_t>(entries_.size());
    int64_t snapshots = 0;
    for (int64_t i = row * states_.columns + run.base; i <= row * states_.columns + last; ++i) {
      const Entries own{states_.snapshot_tables[i], states_.input_tables[i]};
      TORCH_CHECK_INDEX(0 <= own.snapshot && own.snapshot < states_.num_snapshots &&
                            0 <= own.inputs && own.inputs < states_.num_blocks,
                        "column ", i % states_.columns, " of row ", row, " has snapshot ",
                        own.snapshot, " of ", states_.num_snapshots, " and inputs ", own.inputs,
                        " of ", states_.num_blocks);
      entries_.push_back(own);
      snapshots += own.snapshot != 0;
    }
    most_tokens = std::max(most_tokens, run.end());
    most_snapshots = std::max(most_snapshots, snapshots);
    runs.push_back(run);
  }

  RowStates states_{};
  std::vector<Entries> entries_;
};

}  // namespace stepgraph
