package config_test

import (
	"fmt"
	"log"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem/config"
)

func ExampleLoad() {
	flags := pflag.NewFlagSet("train", pflag.ContinueOnError)
	config.AddFlags(flags)
	if err := flags.Parse([]string{"--backend=native,auto"}); err != nil {
		log.Fatal(err)
	}
	c, err := config.Load(&config.LoadOptions{
		Flags:    flags,
		Environ:  func() []string { return []string{"SYMMEM_WORLD_SIZE=8", "SYMMEM_TOKEN=hunter2"} },
		Explicit: map[string]any{"timeout": "90s"},
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, key := range []string{"backend", "world-size", "token", "timeout", "channels"} {
		fmt.Printf("%s = %v (%s)\n", key, c.Value(key), c.Source(key))
	}
	// Output:
	// backend = [native auto] (flag --backend)
	// world-size = 8 (variable SYMMEM_WORLD_SIZE)
	// token = [redacted] (variable SYMMEM_TOKEN)
	// timeout = 1m30s (the program)
	// channels = 64 (default)
}

func ExampleConfig_Validate() {
	c := config.Default()
	c.Backend = []string{"auto", "host"}
	c.Channels = 5000
	fmt.Println(c.Validate())
	// Output:
	// the program: configuration: backend is auto,host; allowed: auto only as the last: it stands for all that is not named before it
	// the program: configuration: channels is 5000; allowed: 1 to 1024
}
