// Package command is the command symmem, for programs that are it and more. A backend or an all-reduce of one's own, which a package
// registers when it is initialized, is checked by verify and measured by bench in a command that imports that package:
//
//	package main
//
//	import (
//		_ "example.com/mine" // registers what is to be checked and measured
//		_ "github.com/symmem/symmem/backend/all"
//		"github.com/symmem/symmem/cmd/symmem/command"
//	)
//
//	func main() { command.Main() }
//
// [Main] only calls run, which takes everything that a process gets from outside as arguments, so that tests call it too. There is one
// file for each sub-command, with its flags. What a sub-command does is in a package under internal: verify, bench and doctor have
// one each, and run is package launch, which starts ranks for all of them and makes sure that nothing is left behind, whatever ends
// the command. Verify and bench start this same executable again, once for each rank, with a hidden sub-command that reports through
// an inherited pipe (package fleet). Doctor does the same for each backend that it probes (package probe).
package command
