package main

import (
	_ "github.com/symmem/symmem/backend/all" // every backend can be named
	"github.com/symmem/symmem/cmd/symmem/command"
)

func main() { command.Main() }
