// Command symmem starts, checks and measures programs on symmetric memory.
//
//	symmem doctor                     what works on this machine, and what to do about what does not
//	symmem run -n 4 -- ./train        start four ranks of a program on this machine
//	symmem verify -n 4                run the correctness suite on the best backend there is
//	symmem bench --sizes 1K:64M       measure all-reduce, put and get
//	symmem version                    which build this is
//
// Every setting of package config is a flag of each command but version: --timeout, --log-level and so on; not on commands that start
// ranks are those that give a rank its place. --json prints results as JSON instead of text, whatever the command.
//
// # Exit status
//
// 0 is success and 1 failure; of doctor, that no backend that may be taken can be used. 2 is a mistake in the command line or the configuration. Run gives the status of the first rank
// that failed, 128 and the number of the signal if one ended it, 126 if the program cannot be executed and 127 if it is not
// there.
//
// # How it is made
//
// main only calls run, which takes all that a process gets from outside as arguments, so that tests call it too. There is one
// file for each sub-command; launch.go starts ranks for all of them, and keeper.go sees to it that run leaves nothing behind,
// whatever ends it. Verify and bench start this same executable again, once
// for each rank, with a hidden sub-command that reports through an inherited pipe.
//
// This room may know everything; nothing imports it.
package main
