// Command symmem-rendezvous is symmem's sub-command rendezvous by itself: the service by which the ranks of jobs meet, outside of them. It has no backend,
// loads no library, and built with CGO_ENABLED=0 it is a static binary, which runs in an empty container:
//
//	CGO_ENABLED=0 go install github.com/symmem/symmem/cmd/symmem/symmem-rendezvous@latest
//	symmem-rendezvous --listen 10.0.0.1:29400
//
// Flags, variables and exit statuses are those of symmem rendezvous.
package main

import (
	"context"
	"os"
	"strings"

	"github.com/symmem/symmem/cmd/symmem/internal/build"
	"github.com/symmem/symmem/cmd/symmem/internal/cli"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/rendezvous"
	_ "github.com/symmem/symmem/group/durable/etcd" // --rendezvous-store etcd://
)

func main() {
	p := &process.Process{Args: os.Args[1:], In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Environ: os.Environ()}
	cmd := rendezvous.Command(p)
	cmd.Use = strings.Replace(cmd.Use, "rendezvous", "symmem-rendezvous", 1)
	cmd.Example = strings.ReplaceAll(cmd.Example, "symmem rendezvous", "symmem-rendezvous")
	cmd.Version = build.Read().String()
	cmd.CompletionOptions.DisableDefaultCmd = true // it has no sub-commands
	os.Exit(cli.Run(context.Background(), p, cmd))
}
