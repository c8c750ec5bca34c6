package machine

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCoreCount(t *testing.T) {
	for want, m := range map[string]Machine{
		"1 core":       {Cores: 1, Online: 1},
		"2 cores":      {Cores: 2, Online: 2},
		"1 of 2 cores": {Cores: 1, Online: 2},
		"3 of 8 cores": {Cores: 3, Online: 8},
		"12 cores":     {Cores: 12}, // how many there are is not known
	} {
		require.Equal(t, want, m.CoreCount())
	}
	require.Equal(t, "1 core", Machine{Cores: 1}.CoreCount())
}
