package main

import (
	_ "github.com/symmem/symmem/backend/all" // every backend can be named
	"github.com/symmem/symmem/cmd/symmem/command"
	_ "github.com/symmem/symmem/cmd/symmem/internal/simulate" // verify --simulate
	_ "github.com/symmem/symmem/group/durable/etcd"           // rendezvous --rendezvous-store etcd://
)

func main() { command.Main() }
