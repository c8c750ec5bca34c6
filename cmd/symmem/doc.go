// Command symmem starts, checks and measures programs on symmetric memory.
//
//	symmem doctor                     what works on this machine, and what to do about what does not
//	symmem run -n 4 -- ./train        start four ranks of a program on this machine
//	symmem rendezvous --listen ADDR   host the rendezvous of jobs outside of their ranks
//	symmem verify -n 4                run the correctness suite on the best backend there is
//	symmem bench --sizes 1K:64M       measure all-reduce, put and get
//	symmem tune --output FILE         measure which forms of collectives are the fastest here, and make a table of them
//	symmem version                    which build this is
//
// Every setting of package config is a flag of each command that uses it: --timeout, --log-level and so on. The settings that give a
// rank its place are not flags of the commands that start ranks. --json prints results as JSON instead of text; run and rendezvous have none.
//
// # Exit status
//
// 0 is success and 1 is failure; doctor fails when no backend that may be taken can be used, and when the configuration is not valid, which it is there to say. 2 is a
// mistake in the command line or, for the other commands, the configuration.
// Run exits with the status of the first rank that failed, 128 and the number of the signal if one ended it, 126 if the program cannot be executed
// and 127 if it is not there.
//
// It has all backends of this module. Package command is the same for a program of one's own.
package main
