#!/usr/bin/env python3
"""Takes one guard after the other out of the code and looks whether the tests that stand for it fail.

    guards.py                        every removal: what ./dev test-long runs
    guards.py --only 14              the removals for one kind of fault; or for a name: --only "no gate"
    guards.py --list                 which there are
    guards.py --check                only whether each still fits the code, its tests exist and docs/reliability.md tells of
                                     both: what ./dev test runs

docs/reliability.md lists 27 kinds of fault with a guard and tests each. A removal is one edit of one place in a copy of the tree:
it takes a guard away, or breaks it, and every test named with it must fail, after all of them have passed in the unbroken copy.
A crash is a failure, and so is a test that hangs. A text to replace that does not stand in its file exactly once is an error, and
so is a removal that does not compile: neither shows anything.

Prints one line per removal and test: how the test failed. --folder DIR keeps copy and build there for the next run.
"""
import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WATCHDOG_S = 120  # ends a test whose guard is gone; the tests' own watchdogs are about as patient
PATIENCE_S = 900  # for a test of sound code


@dataclasses.dataclass
class Removal:
    kinds: tuple  # numbers of the table in docs/reliability.md
    name: str
    file: str
    old: str
    new: str
    tests: tuple


REMOVALS = []


def remove(kinds, name, file, old, new, *tests):
    REMOVALS.append(Removal(kinds if isinstance(kinds, tuple) else (kinds,), name, file, old, new, tests))


# A test is "Suite.Name" or "Suite.Name/Parameter" of tests/*_test.cpp, "Class.test_name" of tests/*_test.py, the NAME of an
# add_test() in tests/CMakeLists.txt, "sim N" for `switchyard verify --sim --seeds N`, or "kills SEED" for one attempt of
# tests/kills.py. Parameters are those of the plainest case where the guard is the same for all.

# ------------------------------------------------------------------------------------- 1: nothing to send or to receive
remove(1, "no flag without tokens", "src/ep/dispatch.cpp",
       "    raise_all(rank, flag, flight.slot,",
       "    if (args_.tokens > 0) raise_all(rank, flag, flight.slot,",
       "sim 50", "EveryWay.NobodySendsAnythingManyTimes/PaddedRead")
remove(1, "rows awaited of those who send none", "src/ep/dispatch.cpp",
       "nothing_from_[static_cast<size_t>(p)] = flight.rows_between(p, rank.me()) == 0;",
       "nothing_from_[static_cast<size_t>(p)] = 0;",
       "sim 50", "EveryWay.RankWithoutExpertsHasAnEmptyBatchThatRefusesRows/PackedRead")
remove(1, "pointers wanted without tokens", "src/ep/dispatch.cpp",
       "    if (args.tokens == 0 && !args.send_counts) return {};\n    if (args.tokens > 0 && !args.x) return bad(",
       "    if (!args.x) return bad(",
       "sim 50", "Session.RandomShapesGiveTheBytesOfTheReferenceInEveryWay", "CApi.TakesStridesOwnOutputAndARankWithoutTokens")

# ---------------------------------------------------------------------------------------------- 2: a slow peer overtaken
remove(2, "no gate", "src/ep/flags.cpp",
       "    if (flight.epoch < rank.base_epoch + depth) waiting_.clear();",
       "    waiting_.clear();",
       "sim 100", "Ahead.ARankOverwritesNothingThatAnotherHasNotSeen/0", "Ahead.ARankOverwritesNothingThatAnotherHasNotSeen/2")
remove(2, "combine awaits nobody", "src/ep/combine.cpp",
       "    switch (await_.poll(rank, thorough)) {\n",
       "    switch (static_cast<void>(thorough), Progress::done) {\n",
       "EveryWay.ResultsAreKeptApartWhenBatchesOverlapWithoutABarrier/PackedRead",
       "Slow.test_many_rounds_with_random_sleeps_are_right")

# ------------------------------------------------------------------------------------------------------ 3: stale handles
remove(3, "any session's batch is taken", "src/session.cpp",
       "    if (batch.session_.get() != this)\n",
       "    if (batch.session_.get() != this && !batch.flight_)\n",
       "EveryWay.StaleBatchesAreRefusedWithoutEffect/PackedRead", "EveryWay.AnotherRanksBatchIsRefusedNamingBoth/PackedRead",
       "CApi.ABatchOfAnotherSessionIsRefusedAndStaysOpen")
remove(3, "a batch that has ended still answers", "src/session.cpp",
       "    if (!flight_ || flight_->epoch != epoch_ || !flight_->open)\n        throw",
       "    if (!flight_)\n        throw",
       "EveryWay.ClosedRankEndsTheOthersCombineAtOnce/PackedRead")
remove(3, "a ticket without its epoch", "src/c_api.cpp",
       "    if (named.epoch() != batch->epoch)\n",
       "    if (named.epoch() < batch->epoch)\n",
       "CApi.AStaleTicketIsRefusedAlsoWhenItsPlaceIsUsedAgain")

# ----------------------------------------------------------------------------------------------- 4: a flag before its data
remove(4, "counts flagged before they are out", "src/ep/dispatch.cpp",
       "    send_counts(rank, flight, args_);\n",
       "    raise_all(rank, waits_for_counts(landing) ? Flag::counted : Flag::arrived, flight.slot,\n"
       "              Word::of(flight.epoch, static_cast<uint32_t>(verdict_.code()), rank.me()));\n"
       "    send_counts(rank, flight, args_);\n",
       "sim 50")
remove(4, "rows flagged before they are out", "src/ep/dispatch.cpp",
       "    if (rank.options.landing == Landing::packed) send_rows(rank, flight, args_);\n",
       "    raise_all(rank, Flag::arrived, flight.slot, Word::of(flight.epoch, 0, rank.me()));\n"
       "    if (rank.options.landing == Landing::packed) send_rows(rank, flight, args_);\n",
       "sim 50")
remove(4, "y flagged before it is there", "src/ep/combine.cpp",
       "    status_ = check_combine(rank, flight, args);\n",
       "    status_ = check_combine(rank, flight, args);\n"
       "    raise_all(rank, Flag::returned, flight.slot, Word::of(flight.epoch, layout::returned_ok, rank.me()));\n",
       "sim 50")
remove(4, "a put that is late", "src/transport/mapped.cpp",
       "    for (const Place& place : places) "
       "std::memmove(windows_[static_cast<size_t>(place.rank)] + place.offset, data, bytes);\n",
       "    static thread_local std::vector<std::byte> late;\n"
       "    static thread_local std::byte* to = nullptr;\n"
       "    for (const Place& place : places) {\n"
       "        if (to) std::memmove(to, late.data(), late.size());\n"
       "        late.assign(static_cast<const std::byte*>(data), static_cast<const std::byte*>(data) + bytes);\n"
       "        to = windows_[static_cast<size_t>(place.rank)] + place.offset;\n"
       "    }\n",
       "TransportContract.FlagIsNeverSeenBeforeThePutBeforeIt/local", "TransportContract.FlagIsNeverSeenBeforeThePutBeforeIt/shm")
remove(4, "promises are kept", "src/simulation.cpp",
       "    shape.broken = play.broken;\n",
       "",
       "BrokenPromise.IsNoticed/flag_before_puts", "BrokenPromise.IsNoticed/flags_overtake",
       "BrokenPromise.IsNoticed/puts_overtake", "BrokenPromise.IsNoticed/old_flag", "BrokenPromise.IsNoticed/lost_wake_up",
       "BrokenPromise.IsNoticed/misplaced_put")

# -------------------------------------------------------------------------------- 5: leftovers of another shape or group
remove(5, "state behind what depends on the shape", "src/layout/window.hpp",
       "    w.flags = window.take(depth * ranks, sizeof(FlagLine), line_bytes);\n",
       "    window.take(1, static_cast<uint64_t>(w.row.payload_bytes), line_bytes);\n"
       "    w.flags = window.take(depth * ranks, sizeof(FlagLine), line_bytes);\n",
       "Window.StatePlaneDependsOnRanksAndDepthOnly")
remove(5, "one count of epochs for all sessions", "src/session.cpp",
       "    uint64_t last_epoch = 0;\n",
       "    static inline thread_local uint64_t last_epoch = 0;\n",
       "SessionOpen.SessionsOfDifferentShapesLiveSideBySide", "Ranks.SessionsOfOneGroupAndOfSeveralLiveSideBySide")
remove(5, "memory of processes as it was left", "src/transport/shm.cpp",
       "            starts_.push_back(static_cast<std::byte*>(p));\n",
       "            starts_.push_back(static_cast<std::byte*>(p));\n"
       "            starts_.back()[0] = std::byte{1};\n",
       "TransportContract.FreshWindowsAreZeroAndPageAligned/shm", "ShmRanks.GroupsOfOneNameMayFollowEachOtherAtOnce")
remove(5, "memory of threads as it was left", "src/transport/local.cpp",
       "        memory_ = {page_bytes, bind_near(p, bytes_)};\n",
       "        memory_ = {page_bytes, bind_near(p, bytes_)};\n"
       "        start_[0] = std::byte{1};\n",
       "TransportContract.FreshWindowsAreZeroAndPageAligned/local")
remove(5, "counts of a rank that has left are read", "src/ep/exchange.cpp",
       "        if (!rank.is_member(q)) {\n",
       "        if (!rank.is_member(q) && rank.generation == 0) {\n",
       "Shrink.SurvivorsGoOnWithoutTheDeadAgainAndAgain/BeforeDispatch")

# ---------------------------------------------------------------------------------------------- 6: one row too many
remove(6, "capacity is not asked for", "src/ep/exchange.cpp",
       "        if (rows <= s.rows_max) continue;\n",
       "        if (rows <= 2 * s.rows_max) continue;\n",
       "EveryWay.WindowOfExactlyTheRowsIsEnoughAndOneLessIsRefusedOnEveryRank/PackedRead")
remove((6, 25), "the mean taken for the most", "src/ep/exchange.cpp",
       "    const int64_t worst = options.tokens_max * options.topk * ranks + ",
       "    const int64_t worst = options.tokens_max * options.topk + ",
       "Session.RandomShapesGiveTheBytesOfTheReferenceInEveryWay", "Bench.test_scenarios_with_uneven_ranks_are_right")
remove(6, "places are not checked", "src/transport/mapped.cpp",
       "    if (bytes > window_bytes_ || offset > window_bytes_ - bytes) {\n",
       "    if (bytes > window_bytes_ && offset > window_bytes_ - bytes) {\n",
       "TransportContract.PlacesOutsideTheWindowEndTheProcessBeforeAnythingIsWritten/local")

# ---------------------------------------------------------------------------------------------------------- 7: bad ids
remove(7, "negative ids are not looked for", "src/ep/routing.cpp",
       "bad |= static_cast<uint32_t>(static_cast<uint32_t>(ids[i]) + 1U > limit);",
       "bad |= static_cast<uint32_t>(ids[i] >= experts);",
       "Routing.FindsTheFirstBadIdWhereverItStands", "EveryWay.BadInputOfDispatchIsRefusedOnEveryRankInTheSameCall/PackedRead")
remove(7, "E passes for an expert", "src/ep/dispatch.cpp",
       "find_bad_id(args.topk_ids, n, rank.options.experts)",
       "find_bad_id(args.topk_ids, n, rank.options.experts + 1)",
       "EveryWay.BadInputOfDispatchIsRefusedOnEveryRankInTheSameCall/PackedRead",
       "Cases.test_a_bad_id_in_a_case_fails_on_every_rank_with_its_place")
remove(7, "the last bad id is named", "src/ep/routing.cpp",
       "            for (int64_t i = start; i < end; ++i)\n                if (",
       "            for (int64_t i = end - 1; i >= start; --i)\n                if (",
       "Routing.FindsTheFirstBadIdWhereverItStands", "EveryWay.FirstBadIdIsNamedAmongMany/PackedRead")

# ------------------------------------------------------------------------------------------------------ 8: repeated ids
remove(8, "a repeated id shares a row", "src/ep/routing.cpp",
       "        places[i] = e < 0 ? RowPlace{-1, 0} : ",
       "        places[i] = e < 0 ? RowPlace{-1, 0} : i > 0 && ids[i - 1] == e ? places[i - 1] : ",
       "Routing.PlacesEqualASortOfAllRows", "DispatchVectors.SessionAgreesOnEveryLanding",
       "Session.RandomShapesGiveTheBytesOfTheReferenceInEveryWay",
       "GoldenCase.SessionGivesTheSameBytesInEveryRound/reference_int8_token_k_over_e_f16")
remove(8, "a repeated id is not counted", "src/ep/routing.cpp",
       "        if (ids[i] >= 0) ++counts[static_cast<size_t>(ids[i])];\n",
       "        if (ids[i] >= 0 && (i == 0 || ids[i - 1] != ids[i])) ++counts[static_cast<size_t>(ids[i])];\n",
       "Routing.PlacesEqualASortOfAllRows", "DispatchVectors.SessionAgreesOnEveryLanding")

# -------------------------------------------------------------------------------------------------------- 9: odd sizes
remove(9, "the last ranks own one expert more", "src/core/options.cpp",
       "    const int64_t first = rank * each + std::min(rank, extra);\n"
       "    return {first, first + each + (rank < extra ? 1 : 0)};\n",
       "    const int64_t more = rank - (ranks - extra);\n"
       "    const int64_t first = rank * each + std::max(more, int64_t{0});\n"
       "    return {first, first + each + (more >= 0 ? 1 : 0)};\n",
       "Placement.IsContiguousAndTheFirstRanksOwnOneMore", "Placement.GivesEveryExpertToExactlyOneRankForAnyNumbers",
       "DispatchVectors.SessionAgreesOnEveryLanding")
remove(9, "workers leave the last piece", "src/ep/workers.hpp",
       "                body(worker, first, first + grain < items ? first + grain : items);\n",
       "                if (first + grain <= items) body(worker, first, first + grain);\n",
       "Session.RandomShapesGiveTheBytesOfTheReferenceInEveryWay")
remove(9, "the last column is left out", "src/quant/quant_scalar.cpp",
       "    return {first, hidden - first > block ? first + block : hidden};\n",
       "    return {first, hidden - first > block ? first + block : hidden - 1};\n",
       "Quant.EqualsScalarOnRandomRowsOfEveryWidth/*",
       "Session.EveryPairOfFormatsGivesTheBytesOfTheReferenceAtEveryWidth")

# ------------------------------------------------------------------------------------------------------ 10: beyond 2^31
remove(10, "the place of a slot in 32 bits", "src/ep/exchange.cpp",
       "        const uint64_t base = w.slot(slot);\n",
       "        const uint64_t base = static_cast<uint32_t>(w.slot(slot));\n",
       "EveryWay.OffsetsBeyond32BitsAreRight/PackedRead")
remove(10, "totals of counts in 32 bits", "src/ep/routing.cpp",
       "            const int64_t rows = expert_first[static_cast<size_t>(e)];\n",
       "            const int64_t rows = static_cast<int32_t>(expert_first[static_cast<size_t>(e)]);\n",
       "Routing.TotalsBeyond31BitsAreCountedRight")
remove(10, "a row of y in 32 bits", "src/layout/window.hpp",
       "    w.y = slot.take(rows, static_cast<uint64_t>(s.hidden * token_bytes(s.token)), page_bytes);\n",
       "    w.y = slot.take(rows, static_cast<uint32_t>(s.hidden * token_bytes(s.token)), page_bytes);\n",
       "Window.SizeIsTheSumOrTheLimitIsSeenInEveryDimension")
remove(10, "the place of a put in 32 bits", "src/transport/mapped.cpp",
       "std::memmove(windows_[static_cast<size_t>(place.rank)] + place.offset, data, bytes);",
       "std::memmove(windows_[static_cast<size_t>(place.rank)] + static_cast<uint32_t>(place.offset), data, bytes);",
       "TransportContract.AWindowMayBeMuchLargerThanMemory/local", "TransportContract.AWindowMayBeMuchLargerThanMemory/shm")
remove(10, "any number of rows", "src/core/options.cpp",
       "    if (o.tokens_max * o.topk >= kMany)\n",
       "    if (o.tokens_max * o.topk >= kMany * kMany)\n",
       "CheckOptions.RefusesMoreRowsThanANumberOfARowCanSay")

# --------------------------------------------------------------------------------------------------- 11: special values
remove(11, "a NaN is lost in the maximum", "src/quant/quant_scalar.cpp",
       "        largest = std::max<typename Token::Bits>(largest, bits & Token::magnitude);\n",
       "        if ((bits & Token::magnitude) <= Token::infinity)\n"
       "            largest = std::max<typename Token::Bits>(largest, bits & Token::magnitude);\n",
       "Quant.EncodesEveryVector/scalar", "Quant.MatchesTheExhaustiveDigests/scalar",
       "Quant.EqualsScalarOnEveryPatternInEveryLane/*")
remove(11, "a value is rounded twice", "src/quant/quant_scalar.cpp",
       "return round_to_grid<E4M3>(x / s, E4M3::largest);",
       "return round_to_grid<E4M3>(F16::widen(F16::narrow(x / s)), E4M3::largest);",
       "Quant.AgreesWithLongDoubleArithmetic/scalar")
remove(11, "zeroes have no scale", "src/quant/quant_scalar.cpp",
       "    Scale scale(float amax) const { return int8_scale(amax); }\n",
       "    Scale scale(float amax) const { return amax / 127.0F; }\n",
       "Quant.EncodesEveryVector/scalar")
remove(11, "the caller's floating point mode", "src/quant/quant_scalar.cpp",
       "    const FloatMode mode;\n    encode_in_mode(",
       "    encode_in_mode(",
       "Quant.GivesTheSameBytesInAnyFloatingPointModeAndRestoresIt/scalar")

# ----------------------------------------------------------------------------------------------------- 12: disagreement
remove(12, "options are not compared", "src/session.cpp",
       "            if (values[i] != first[i]) {\n",
       "            if (values[i] != first[i] && values.empty()) {\n",
       "SessionOpen.RanksMustAgreeAboutEveryAgreedOption", "RanksOpen.DifferentOptionsGiveEveryRankTheSameError")
remove(12, "tags are not compared", "src/ep/exchange.cpp",
       "        return its != first_tag;\n",
       "        static_cast<void>(its);\n        return false;\n",
       "EveryWay.DifferentTagsAreRefusedNamingBoth/PackedRead")
remove(12, "counts are believed", "src/ep/exchange.cpp",
       "        if (head.epoch != flight.epoch || head.tokens < 0 || head.tokens > s.tokens_max || impossible ||\n"
       "            sum > head.tokens * s.topk)\n",
       "        if (head.epoch != flight.epoch)\n",
       "Tampered.CountsOfAnotherRankAreRefusedAsCorrupt/0")
remove(12, "own counts are read back", "src/ep/exchange.cpp",
       "        if (q == rank.me()) {\n            flight.source_tokens",
       "        if (q == rank.me() && !rank.is_member(q)) {\n            flight.source_tokens",
       "Tampered.OwnCountsInTheWindowAreNeverReadBack/0")
remove(12, "ids need not be those counted", "src/ep/exchange.cpp",
       "        if (found != expected) return differs();\n",
       "        if (found > expected) return differs();\n",
       "Tampered.IdsThatAreNotThoseCountedAreCorruptAndWriteNothing")
remove(12, "source info is believed", "src/ep/exchange.cpp",
       "    return s.rank >= 0 && s.rank < flight.rank->ranks() && s.token >= 0 &&\n"
       "           s.token < flight.source_tokens[static_cast<size_t>(s.rank)] && s.k >= 0",
       "    return s.k >= 0",
       "Tampered.SourceInfoThatPointsNowhereIsCorruptAndWritesNothing")
remove(12, "any version is welcome", "src/transport/rendezvous.cpp",
       "        if (h.version != format_version) {\n",
       "        if (h.version < format_version) {\n",
       "ShmRanks.AnotherVersionIsNamed")
remove(12, "any size is welcome", "src/transport/rendezvous.cpp",
       "        if (h.size != group_.size) {\n",
       "        if (h.size < group_.size) {\n",
       "ShmRanks.RanksOfDifferentSizesEndTheGroupWithBothNamed")

# -------------------------------------------------------------------------------------- 13: leftovers, names, strangers
remove(13, "no seals", "src/transport/rendezvous.cpp",
       "    if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return refused(\"sealing\");\n",
       "",
       "ShmRanks.SharedMemoryCannotBeCutShort")
remove(13, "a seal is not asked for", "src/transport/rendezvous.cpp",
       " || !is_whole || (seals & F_SEAL_SHRINK) == 0) {",
       " || !is_whole) {",
       "ShmRanks.MemoryThatIsNotWhatWasAnnouncedIsRefused")
remove(13, "a file size limit is not asked for", "src/transport/rendezvous.cpp",
       "limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur;",
       "limit.rlim_cur != RLIM_INFINITY && bytes == limit.rlim_cur;",
       "ShmRanks.AFileSizeLimitIsAnErrorAndNoSignal")
remove(13, "any token opens", "src/transport/rendezvous.cpp",
       "        if (!same_token(message_.token, group_.token)) {\n",
       "        if (!same_token(message_.token, message_.token)) {\n",
       "ShmRanks.AProcessWithAnotherTokenIsRefusedAndTheGroupGoesOn")
remove(13, "one socket for all names", "src/transport/rendezvous.cpp",
       "    for (const char c : group.name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100'0000'01b3;\n",
       "",
       "ShmRanks.GroupsOfDifferentNamesDoNotMeet")
remove(13, "another user is heard", "src/transport/rendezvous.cpp",
       "            if (!peer_of(socket.get(), &peer) || peer.uid != geteuid()) continue;",
       "            if (!peer_of(socket.get(), &peer)) continue;",
       "ShmRanks.AnotherUserNeitherGetsInNorIsTrusted")
remove((13, 22), "descriptors stay open", "src/transport/rendezvous.cpp",
       "    if (fd_ >= 0) close(fd_);\n",
       "",
       "Ranks.LeaveNothingBehindHoweverTheyEnd", "Ranks.OpenSessionHoldsNoSocket")

# ------------------------------------------------------------------------------------------------- 14: deaths and stops
remove((14, 22), "nobody is seen to have died", "src/transport/shm.cpp",
       "            lost_[peer].store(true, std::memory_order_release);",
       "            lost_[peer].store(false, std::memory_order_release);",
       "Death.SurvivorsReportTheRankThatDied/BeforeDispatch", "Death.SurvivorsReportTheRankThatDied/WhileOthersWait",
       "Death.SurvivorsReportTheRankThatDied/BeforeCombine", "Death.SurvivorsReportTheRankThatDied/WhileOthersWaitInCombine",
       "Ranks.RankThatExitsWithoutClosingIsReported",
       "Endings.test_a_killed_rank_is_named_by_the_others_and_nothing_is_left")
remove(14, "only awaited ranks are looked at", "src/ep/flags.cpp",
       "    const bool any_end_counts = !gate_ && flag_ != Flag::returned && refuser_ < 0 && !lost_;\n",
       "    const bool any_end_counts = false;\n",
       "Ranks.DeathIsNoticedAlsoByARankThatWaitsForAnother")
remove(14, "who left is not looked at", "src/ep/flags.cpp",
       "        const Word gone = see(rank, Flag::gone, slot_, peer);  // model: left_gone\n",
       "        const Word gone{};\n",
       "sim 100", "EveryWay.RankThatWaitsForAnotherHearsAtOnceThatAThirdGaveUp/PackedRead")
remove(14, "rows of the dead stay as they are", "src/ep/dispatch.cpp",
       "        if (flight.lost[static_cast<size_t>(p)]) blank_rows_of(rank, flight, p);\n",
       "        if (flight.lost[static_cast<size_t>(p)] > 1) blank_rows_of(rank, flight, p);\n",
       "sim 3000", "Partial.ADeathBetweenCountsAndRowsBlanksTheDeadRanksRows")
remove(14, "slots of the dead are not counted", "src/ep/combine.cpp",
       "            missing[t] += owner >= 0 && flight.lost[static_cast<size_t>(owner)] != 0;\n",
       "            missing[t] += owner >= 0 && flight.lost[static_cast<size_t>(owner)] > 1;\n",
       "sim 3000", "Partial.ADeathBetweenCountsAndRowsBlanksTheDeadRanksRows")
remove((14, 22), "a failed run is not ended", "tools/launch.cpp",
       "            kill_at = std::min(kill_at, Clock::now() + std::chrono::milliseconds(std::min(wait_ms, int64_t{1} << 40)));\n",
       "            kill_at = Clock::time_point::max() - std::chrono::milliseconds(std::min(wait_ms, int64_t{1}));\n",
       "kills 6", "Endings.test_a_stopped_rank_ends_the_run_at_the_deadline")

# ------------------------------------------------------------------------------------------------ 15: few CPUs for many ranks
remove(15, "who waits does not sleep", "src/session.cpp",
       "                link_.sleep(asleep.ticket, std::min(slice_ns, deadline.at_ns - now));\n",
       "                static_cast<void>(slice_ns);\n",
       "Ranks.WaitingTakesNextToNoCpu")

# ---------------------------------------------------------------------------------------------------------- 16: timeouts
remove((14, 16), "who is awaited is not named", "src/ep/flags.cpp",
       "who += fmt::format(\"{}{}\", i ? \", \" : \"\", waiting_[i]);\n",
       "who += i ? \", ?\" : \"?\";\n",
       "EveryWay.RankThatDoesNotDispatchIsNamedWhenTheDeadlinePasses/PackedRead",
       "EveryWay.RankThatDoesNotCombineIsNamedAndTheNextDispatchTellsEverybody/PackedRead",
       "Ranks.StoppedRankIsNamedAtTheDeadlineAndGoesOnLater", "Ranks.RankStoppedBeforeCombineIsNamedAndGoesOnLater")
remove(16, "a session's deadline does not hold", "src/session.cpp",
       "        return Deadline::after_ms(timeout_ms > 0 ? timeout_ms : rank->options.timeout_ms);\n",
       "        return Deadline::after_ms(timeout_ms > 0 ? timeout_ms : std::numeric_limits<int64_t>::max());\n",
       "EveryWay.DeadlineOfASessionHoldsForItsCalls/PackedRead")
remove(16, "the environment is not read", "src/core/options.cpp",
       "        if (!text) continue;\n",
       "        if (!text || *text) continue;\n",
       "OptionEnvironment.SetsEveryOption")

# ------------------------------------------------------------------------------------------------------------ 17: slow ranks
remove(17, "waits are not counted", "src/session.cpp",
       "        if (peer >= 0) waits[static_cast<size_t>(peer)] += ns;\n        rank->trace.waited(peer, ns);\n",
       "        static_cast<void>(peer), static_cast<void>(ns);\n",
       "EveryWay.WaitsAreCountedForTheRankThatWasLate/PackedRead",
       "Slow.test_a_rank_that_is_slowed_by_5_ms_is_named_and_the_timeline_shows_it")
remove(17, "waits are not drawn", "bench/report.cpp",
       "            for (const Row* r : in_cell) figures += wait_map(*r);\n",
       "            for (const Row* r : in_cell) figures += r->cell.empty() ? wait_map(*r) : \"\";\n",
       "Report.test_waits_curves_bars_and_the_seed_table")

# ------------------------------------------------------------------------------------- 18: strides, odd addresses
remove(18, "rows are taken for dense", "src/ep/exchange.cpp",
       "    const int64_t stride = (args.row_stride ? args.row_stride : w.shape.hidden) * layout::token_bytes(w.shape.token);\n"
       "    const RowFormat format",
       "    const int64_t stride = w.shape.hidden * layout::token_bytes(w.shape.token);\n"
       "    const RowFormat format",
       "Session.RandomShapesGiveTheBytesOfTheReferenceInEveryWay")
remove(18, "rows in place are taken for dense", "src/ep/exchange.cpp",
       "    const int64_t stride = (args.row_stride ? args.row_stride : w.shape.hidden) * layout::token_bytes(w.shape.token);\n"
       "    const auto* from",
       "    const int64_t stride = w.shape.hidden * layout::token_bytes(w.shape.token);\n"
       "    const auto* from",
       "Session.RandomShapesGiveTheBytesOfTheReferenceInEveryWay", "CApi.TakesStridesOwnOutputAndARankWithoutTokens")
remove(18, "x is taken for aligned", "src/ep/exchange.cpp",
       "    const auto* x = static_cast<const std::byte*>(args.x);\n",
       "    const auto* x = reinterpret_cast<const std::byte*>(reinterpret_cast<uintptr_t>(args.x) & ~uintptr_t{1});\n",
       "EveryWay.PointersNeedNoAlignment/PackedRead")
remove(18, "a stride below hidden passes", "src/ep/dispatch.cpp",
       "    if (args.row_stride != 0 && (args.row_stride < s.hidden || ",
       "    if (args.row_stride != 0 && (args.row_stride < 0 || ",
       "EveryWay.BadInputOfDispatchIsRefusedOnEveryRankInTheSameCall/PackedRead")

# ------------------------------------------------------------------------------------------- 19: what nobody routes
remove(19, "an unused slot is read", "src/ep/exchange.cpp",
       "                    rows[k] = is_there ? where(place, t, k) : nullptr;\n",
       "                    rows[k] = is_there ? where(place, t, k) : rank.own(w.slot(flight.slot) + w.y);\n",
       "EveryWay.NaNInWhatNobodyRoutesDoesNotReachResults/PackedRead")
remove(19, "a token without a slot is passed over", "src/ep/exchange.cpp",
       "                const quant::CombineInput input{\n",
       "                if (std::all_of(rows, rows + topk, [](const void* row) { return row == nullptr; })) continue;\n"
       "                const quant::CombineInput input{\n",
       "EveryWay.TokenWithoutAUsedSlotIsZeroOrItsShared/PackedRead")
remove(19, "a slot without a row is summed", "src/quant/quant_scalar.cpp",
       "            if (input.rows[k] != nullptr) add(k, first, last, acc);\n",
       "            add(k, first, last, acc);\n",
       "Quant.CombineEqualsScalarForEverySlotPatternAndWireForm/scalar")

# ------------------------------------------------------------------------------------------------------- 20: accuracy
remove(20, "noise is not squared", "src/quant/accuracy.cpp",
       "signal += x * x, noise += error * error, sum += error;",
       "signal += x * x, noise += error, sum += error;",
       "Accuracy.IsThatOfFourValuesByHand")
remove(20, "lost values are not counted", "src/quant/accuracy.cpp",
       "                if (a.lost++ == 0) a.worst_row = r, a.worst_column = c;\n",
       "                if (a.lost == 0) a.worst_row = r, a.worst_column = c;\n",
       "Accuracy.SeesWhatTheSamplesRecipeLosesAndWhatBecomesZero")
remove(20, "NaN counts as a value", "src/quant/accuracy.cpp",
       "            if (!std::isfinite(x)) {\n",
       "            if (std::isinf(x)) {\n",
       "Accuracy.UnquantisedRowsAreExactAndNaNIsNotCompared")
remove(20, "anything is measured", "src/quant/accuracy.cpp",
       "    if (args.rows < 0 || args.hidden < 1 || (args.row_stride != 0 && args.row_stride < args.hidden))\n",
       "    if (args.rows < 0)\n",
       "Accuracy.WhatCannotBeMeasuredIsRefused")
remove(20, "the accuracy is not told", "tools/run.cpp",
       "    accuracy(\"dispatch_quant\", in.x, tokens, c.options.dispatch_format());\n",
       "",
       "Landings.test_accuracy_of_a_format_is_told_on_the_values_that_were_sent")

# -------------------------------------------------------------------------------------------------- 21: the same bits
remove(21, "the order of a sum depends on the batch", "src/ep/exchange.cpp",
       "                const quant::CombineInput input{\n"
       "                    .token = w.shape.token,\n"
       "                    .wire = rank.options.combine_format(),\n"
       "                    .encoded = encoded,\n"
       "                    .rows = rows,\n"
       "                    .scales = scales,\n"
       "                    .weights = args.topk_weights ? args.topk_weights + t * topk : nullptr,\n",
       "                std::vector<float> weights(static_cast<size_t>(topk), 1.0F);\n"
       "                if (args.topk_weights) std::memcpy(weights.data(), args.topk_weights + t * topk, weights.size() * 4);\n"
       "                if (flight.tokens > 1) {\n"
       "                    std::reverse(rows, rows + topk);\n"
       "                    std::reverse(scales, scales + topk);\n"
       "                    std::reverse(weights.begin(), weights.end());\n"
       "                }\n"
       "                const quant::CombineInput input{\n"
       "                    .token = w.shape.token,\n"
       "                    .wire = rank.options.combine_format(),\n"
       "                    .encoded = encoded,\n"
       "                    .rows = rows,\n"
       "                    .scales = scales,\n"
       "                    .weights = weights.data(),\n",
       "EveryWay.TokenHasTheSameBitsAloneAndAmongOthersAndForEveryRankCount/PackedRead",
       "EveryWay.SumIsInOrderOfSlotsAndRoundedOnce/PackedRead")
remove(21, "one kernel set sums from the end", "src/quant/quant_scalar.cpp",
       "        for (int64_t k = 0; k < input.topk; ++k) {\n",
       "        for (int64_t k = input.topk - 1; k >= 0; --k) {\n",
       "Simulation.ASeedPlaysTheSameWithEveryInstructionSet")

# ------------------------------------------------------------------------------------------------------- 22: tear-down
remove(22, "windows are mapped in a child", "src/transport/shm.cpp",
       "            madvise(p, whole, MADV_DONTFORK);\n            madvise(p, whole, MADV_HUGEPAGE);",
       "            madvise(p, whole, MADV_HUGEPAGE);",
       "ShmRanks.AChildAfterForkDoesNotDisturbItsParent")
remove(22, "a child unmaps what it does not have", "src/transport/shm.cpp",
       "        if (getpid() == owner_) unmap();\n",
       "        unmap();\n",
       "ShmRanks.AChildAfterForkDoesNotDisturbItsParent")
remove(22, "a child closes for its parent", "src/session.cpp",
       "        if (!rank->here()) return;  // a forked child does not have the windows\n",
       "",
       "Ranks.ForkedChildOfARankDoesNoHarm")
remove(22, "close says nothing", "src/session.cpp",
       "        ep::raise_closed(*rank);  // model: close\n",
       "",
       "EveryWay.ClosedRankEndsTheOthersDispatchAtOnce/PackedRead", "EveryWay.ClosedRankEndsTheOthersCombineAtOnce/PackedRead",
       "CApi.CloseMayBeCalledTwiceAndEndsEverything")
remove(22, "close leaves batches open", "src/session.cpp",
       "        for (ep::Flight& f : flights)\n            if (f.open) ep::drop(*rank, f);  // model: close_drops\n",
       "",
       "EveryWay.SessionsAndBatchesDieInAnyOrder/PackedRead", "EveryWay.ClosedRankEndsTheOthersCombineAtOnce/PackedRead",
       "CApi.CloseMayBeCalledTwiceAndEndsEverything")
remove(22, "a handle is destroyed in silence", "src/ep/dispatch.cpp",
       "void DispatchStep::withdraw(Rank& rank, Flight& flight) {\n    if (phase_ == Phase::ended) return;\n",
       "void DispatchStep::withdraw(Rank& rank, Flight& flight) {\n    if (phase_ != Phase::gate) return;\n",
       "sim 3000", "Async.DestroyedDispatchIsGivenUpForAll/CallerPackedRead")
remove(22, "a dropped batch counts as combined", "src/ep/combine.cpp",
       "Word::of(flight.epoch, layout::returned_dropped, rank.me())",
       "Word::of(flight.epoch, layout::returned_ok, rank.me())",
       "EveryWay.DroppedBatchFailsTheOthersCombineAtOnceNamingTheRank/PackedRead")
remove(22, "ranks outlive their launcher", "tools/launch.cpp",
       "    prctl(PR_SET_PDEATHSIG, SIGKILL);\n",
       "",
       "Endings.test_a_killed_launcher_takes_its_ranks_along")

# --------------------------------------------------------------------------------------------------------- 23: replicas
remove(23, "a rank may hold an expert twice", "src/plan/placement.cpp",
       "        if (last_holder[index(e)] == r)\n",
       "        if (last_holder[index(e)] == r + ranks)\n",
       "PlacementTable.RefusesWhatItMustNotHold", "SessionWithReplicas.TablesMustBeEqualAndFit")
remove(23, "tables are not compared", "src/session.cpp",
       "        if (head.has_table != first_head.has_table || head.table != first_head.table)\n",
       "        if (head.has_table != first_head.has_table)\n",
       "SessionWithReplicas.TablesMustBeEqualAndFit")
remove(23, "every rank takes turns as rank 0 does", "src/session.cpp",
       "plan::turns_of(*table, link->rank())",
       "plan::turns_of(*table, 0)",
       "SessionWithReplicas.EqualsTheReferenceForAnyTable")
remove(23, "ids go out as slots", "src/ep/exchange.cpp",
       "    if (rank.turns.empty() && !some_left) return args.topk_ids;\n",
       "    if (!some_left) return args.topk_ids;\n",
       "SessionWithReplicas.EqualsTheReferenceForAnyTable",
       "GoldenCase.SessionWithReplicasCombinesToTheSameBytes/sample_r2_b6_h1024_k8_bf16_mx")
remove(23, "only the first replica answers", "src/ep/routing.cpp",
       "        slots[i] = slot;\n",
       "        slots[i] = slot == turn[0] ? slot : -1;\n",
       "GoldenCase.SessionWithReplicasCombinesToTheSameBytes/sample_r2_b6_h1024_k8_bf16_mx")
remove(23, "turns begin at the first replica", "src/ep/routing.cpp",
       "static_cast<int32_t>(turns.start % length);",
       "static_cast<int32_t>(length - length);",
       "ReplicaChoice.RoundRobinCountsARanksRowsForAnExpert", "ReplicaChoice.LeastLoadedKeepsToThePartsAtEveryLength")
remove(23, "nobody is nearest", "src/plan/placement.cpp",
       "table.choice == ReplicaChoice::nearest && table.rank_of(s) == rank;",
       "table.choice == ReplicaChoice::nearest && table.rank_of(s) == table.ranks + rank;",
       "ReplicaChoice.NearestStaysAtHomeWhereItCan")
remove(23, "replicas on ranks that have left", "src/ep/routing.cpp",
       "            if (const int32_t at = turn[next[e]]; !has_left(at)) slot = at;\n",
       "            slot = turn[next[e]];\n",
       "ReplicaChoice.PassesOverOwnersThatHaveLeft")

# ---------------------------------------------------------------------------------------------------------- 24: plans
remove(24, "the planner's own rule of owners", "src/plan/cost.cpp",
       "placement.owner[static_cast<size_t>(topk_ids[static_cast<size_t>(i)])];",
       "topk_ids[static_cast<size_t>(i)] / layout::ceil_div(placement.experts, ranks);",
       "PredictedBytes.AreThoseThatTheRunCounts")
remove((24, 25), "source info is not counted", "src/ep/exchange.cpp",
       "    const int64_t row_bytes = travelling_row_bytes(rank.window.row, rank.window.shape.weights);\n    int64_t rows = 0",
       "    const int64_t row_bytes = rank.window.row.payload_bytes + rank.window.row.scale_bytes();\n    int64_t rows = 0",
       "PredictedBytes.AreThoseThatTheRunCounts", "EveryWay.StatisticsCountRowsAndBytes/PackedRead",
       "Bench.test_bytes_waiting_and_limit_are_told")
remove(24, "slots shared out by another rule", "src/plan/placement.cpp",
       "    return slot < extra * (each + 1) ? slot / (each + 1) : extra + (slot - extra * (each + 1)) / each;\n",
       "    return slot / (each + (extra > 0 ? 1 : 0));\n",
       "PlacementTable.GivesASlotToTheRankThatWouldOwnSuchAnExpert", "Planner.KeepsItsPromisesForAnyLoads",
       "Planner.BringsZipfWithAQuarterOfReplicasBelow115")
remove(24, "loads without rank 0", "src/ep/exchange.cpp",
       "    for (size_t q = 0; q < ranks; ++q) add(q, rank.seen);\n",
       "    for (size_t q = 1; q < ranks; ++q) add(q, rank.seen);\n",
       "SessionLoads.CountWithoutATableToo")

# ------------------------------------------------------------------------------------------------------- 25: benchmarks
remove(25, "rows are not compared", "bench/rank.cpp",
       "            std::string wrong = p.expected->wrong_rows(c, got, p.task->row());\n",
       "            std::string wrong;\n",
       "Bench.test_a_wrong_contestant_fails_the_bench")
remove(25, "the tail is not told", "bench/results.cpp",
       "                 {\"p99_us\", group.p99},\n",
       "                 {\"p99_us\", group.min},\n",
       "Bench.test_every_contestant_of_the_build_is_right_and_has_all_fields")

# --------------------------------------------------------------------------------------------------------- 27: building
remove(27, "a dependency is not told", "cmake/switchyardConfig.cmake.in",
       "find_dependency(fmt)\n",
       "",
       "Install.AProjectFindsBuildsAndRuns")
remove(27, "an include climbs", "src/quant/accuracy.cpp",
       "#include \"quant/numbers.hpp\"\n",
       "#include \"../quant/numbers.hpp\"\n",
       "Layers.NoIncludeClimbsOrSkips")


# ------------------------------------------------------------------------------------------------------------- which tests

def tests_of_the_tree():
    """Every test that the sources define, without parameters -> the file it stands in, or None for a test of ctest."""
    known = {}
    for file in sorted((ROOT / "tests").glob("*_test.cpp")):
        for suite, name in re.findall(r"^TEST(?:_P|_F)?\((\w+), (\w+)\)", file.read_text(), re.M):
            known[f"{suite}.{name}"] = file
    for file in sorted((ROOT / "tests").glob("*_test.py")):
        suite = ""
        for line in file.read_text().splitlines():
            if found := re.match(r"class (\w+)\(", line):
                suite = found.group(1)
            elif found := re.match(r"    def (test_\w+)\(", line):
                known[f"{suite}.{found.group(1)}"] = file
    for name in re.findall(r"add_test\(NAME (\S+)", (ROOT / "tests/CMakeLists.txt").read_text()):
        known[name] = None
    return known


KNOWN = tests_of_the_tree()


def plain(test):
    return test.split("/")[0]


def targets_of(test):
    if test.startswith(("sim ", "kills ")):
        return ["switchyard_cli"]
    file = KNOWN[plain(test)]
    if file is None:
        return [] if test.startswith("Layers.") else ["switchyard_cli", "switchyard_bench"]  # all that is installed
    if file.suffix == ".cpp":
        return [file.stem]
    return ["switchyard_cli", "switchyard_bench"] if file.stem in ("bench_test", "report_test") else ["switchyard_cli"]


def command_of(test, tree):
    build, cli = tree / "build", tree / "build/switchyard"
    if test.startswith("sim "):
        return [cli, "verify", "--sim", "--seeds", test.split()[1]]
    if test.startswith("kills "):
        return [sys.executable, tree / "tests/kills.py", cli, "--kills", "1", "--seed", test.split()[1]]
    file = KNOWN[plain(test)]
    if file is None:
        return ["ctest", "--test-dir", build, "--output-on-failure", "-R", f"^{re.escape(test)}$"]
    if file.suffix == ".cpp":
        return [build / file.stem, f"--gtest_filter={test}:*/{test}"]
    golden = [tree / "tests/golden"] if file.stem == "cli_test" else []
    return [sys.executable, tree / "tests" / file.name, cli, *golden, test]


# ---------------------------------------------------------------------------------------------------------------- the check

def table_rows():
    """Number of a kind -> its row of the table, as cells."""
    rows = {}
    for line in (ROOT / "docs/reliability.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 5 and cells[0].isdigit():
            rows[int(cells[0])] = cells
    return rows


def misfits_of_code():
    wrong = []
    for r in REMOVALS:
        if (times := (ROOT / r.file).read_text().count(r.old)) != 1:
            wrong.append(f"{r.name}: its text stands in {r.file} {times} times, not once:\n{r.old}")
        wrong += [f"{r.name}: there is no test {t}" for t in r.tests
                  if not re.fullmatch(r"(sim|kills) \d+", t) and plain(t) not in KNOWN]
    return wrong


def misfits_of_table():
    wrong = []
    rows = table_rows()
    if sorted(rows) != list(range(1, 28)):
        wrong.append(f"docs/reliability.md: the table has rows {sorted(rows)}, not 1..27")
    for kind, (_, _, _, tests, removed) in rows.items():
        mine = [r for r in REMOVALS if kind in r.kinds]
        wrong += [f"docs/reliability.md: row {kind} does not tell of the removal \"{r.name}\"" for r in mine
                  if f"*{r.name}*" not in removed]
        proven = {plain(t) for r in mine for t in r.tests}
        for name in re.findall(r"`(?:\w+/)?(\w+\.[\w*]+)(?:/[\w*]+)?`", tests):
            meant = [t for t in KNOWN if t.startswith(name[:-1])] if name.endswith(".*") else [name]
            wrong += [f"docs/reliability.md: row {kind}: no removal for {t}" for t in meant if t not in proven]
    return wrong


# ------------------------------------------------------------------------------------------------------------------ the runs

def run(command, seconds, cwd=None):
    """Runs it with all that it starts; returns (exit code or None when its time was up, what it said)."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen([str(c) for c in command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                                   start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(process.pid, signal.SIGKILL)  # whom it left behind, too
        except ProcessLookupError:
            pass
        process.wait()
        said.seek(0)
        return code, said.read()


def shortened(text, columns=170):
    text = " ".join(text.split())
    return text if len(text) <= columns else text[: columns - 1] + "…"


def how_it_failed(code, said):
    ends = "hangs" if code is None else f"died of {signal.Signals(-code).name}" if code < 0 else ""
    for pattern in (r": Failure\n(.+?)(?=\n\S+: Failure\n|\nGoogle Test trace|\n\[|\n\n|\Z)",  # GoogleTest
                    r"^((?:\w+\.)*\w*(?:Error|Expired)\b[^\n]*)$",  # unittest
                    r": WRONG\n(.+?)\n",  # a seed
                    r"\n([^\n]+)\n+0% tests passed"):  # ctest
        if found := re.search(pattern, said, re.S | re.M):
            return f"{shortened(found.group(1))}{', ' if ends else ''}{ends}"
    lines = [line for line in said.splitlines() if line.strip()]
    return ends or shortened(lines[-1] if lines else f"exit code {code}")


class Copy:
    """The tracked files in a folder of their own, configured and built there."""

    def __init__(self, folder, jobs):
        self.tree, self.jobs = folder / "tree", jobs
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.strip("\0").split("\0"):
            source, to = ROOT / name, self.tree / name
            if source.is_file() and not (to.is_file() and to.read_bytes() == source.read_bytes()):
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, to)
        launcher = ["-DCMAKE_C_COMPILER_LAUNCHER=ccache", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
        without = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("MPI", "Gloo", "benchmark", "OpenBLAS")]
        code, said = run(["cmake", "-G", "Ninja", "-S", self.tree, "-B", self.tree / "build", "-DCMAKE_BUILD_TYPE=Release",
                          "-DSWITCHYARD_EXAMPLES=OFF", *without, *launcher], None)
        if code != 0:
            sys.exit(f"the copy cannot be configured:\n{said}")

    def build(self, tests):
        """What the compiler says, or nothing when all is well."""
        targets = sorted({target for test in tests for target in targets_of(test)})
        if not targets:
            return ""
        code, said = run(["ninja", "-C", self.tree / "build", "-j", self.jobs, *targets], None)
        return said if code != 0 else ""

    def play(self, test, seconds):
        return run(command_of(test, self.tree), seconds, self.tree)

    def skipped_unbroken(self, tests):
        """Runs the tests in the unbroken copy: all must pass. Returns those that pass by leaving themselves out."""
        skipped = set()
        for test in tests:
            code, said = self.play(test, PATIENCE_S)
            if "[  SKIPPED ]" in said:
                skipped.add(test)
            elif code != 0 or "[  PASSED  ] 0 tests" in said or "No tests were found" in said:
                sys.exit(f"{test} does not pass in the unbroken copy, or there is no such parameter:\n{said[-4000:]}")
        return skipped

    def unnoticed_without(self, r, skipped):
        """Removes the guard, runs its tests, and puts the guard back. Returns the tests that do not fail."""
        file = self.tree / r.file
        sound = file.read_text()
        file.write_text(sound.replace(r.old, r.new))
        unnoticed = []
        try:
            head = f"{','.join(map(str, r.kinds))}: {r.name}"
            if said := self.build(r.tests):
                error = re.search(r"^.*\berror: .*$", said, re.M)
                print(f"! {head}: does not compile: {error.group(0) if error else said[-2000:]}", flush=True)
                return list(r.tests)
            for test in r.tests:
                if test in skipped:
                    print(f"  {head}: {test}: not run on this machine", flush=True)
                    continue
                code, said = self.play(test, WATCHDOG_S)
                good = code != 0
                print(f"{' ' if good else '!'} {head}: {test}: {how_it_failed(code, said) if good else 'NOT NOTICED'}", flush=True)
                if not good:
                    unnoticed.append(test)
        finally:
            file.write_text(sound)
        return unnoticed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a kind's number, or a removal's name; may be given again")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, help="where copy and build stay")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    chosen = [r for r in REMOVALS if not args.only or r.name in args.only or {str(k) for k in r.kinds} & set(args.only)]
    if not chosen:
        parser.error(f"there is no removal {', '.join(args.only)}; --list shows them")
    if args.list:
        for r in chosen:
            print(f"{','.join(map(str, r.kinds)):>5}  {r.name} ({r.file})\n" + "".join(f"         {t}\n" for t in r.tests), end="")
        return 0
    if wrong := misfits_of_code() + (misfits_of_table() if args.check else []):
        print("\n".join(wrong))
        return 1
    if args.check:
        print(f"{len(REMOVALS)} removals fit the code and docs/reliability.md")
        return 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        copy = Copy(args.folder.resolve() if args.folder else pathlib.Path(folder), args.jobs)
        tests = list(dict.fromkeys(t for r in chosen for t in r.tests))
        if said := copy.build(tests):
            sys.exit(f"the copy cannot be built:\n{said[-4000:]}")
        skipped = copy.skipped_unbroken(tests)
        print(f"{len(tests)} tests pass in the unbroken copy", flush=True)
        unnoticed = [f"{r.name}: {t}" for r in chosen for t in copy.unnoticed_without(r, skipped)]
    print(f"{len(chosen)} removals, {time.monotonic() - start:.0f} s: "
          f"{'every test has failed' if not unnoticed else 'NOT NOTICED: ' + '; '.join(unnoticed)}")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
