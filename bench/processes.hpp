// Starts the ranks of a tree, by mpirun where a contestant needs it, and hears what they tell.
//
// mpirun passes no pipes on: its ranks write lines into files of a temporary folder, which the parent reads. Ranks end with
// their parent, however it ends.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace switchyard::bench {

using Heard = std::function<void(int rank, const nlohmann::json& message)>;

/// Plays tree number `tree` and returns when all its ranks have ended. "" when all ended well, else what went wrong.
std::string play_tree(int tree, int ranks, bool by_mpirun, char** argv, const Heard& heard);

/// In a rank: the number of its tree; in the parent: -1.
int tree_of_rank();
/// In a rank: sets what Group::from_environment reads, and ends this process when its parent does.
void prepare_rank();
/// In a rank: sends a message to the parent.
void tell(const nlohmann::json& message);

/// A folder that all ranks of a tree see, gone afterwards.
std::filesystem::path meeting_folder();

/// The arguments that mpirun is given for that many ranks, for the output.
std::string mpirun_text(int ranks);

}  // namespace switchyard::bench
