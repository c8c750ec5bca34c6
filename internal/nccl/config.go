package nccl

import "math"

// Config sets how a communicator works. The zero Config blocks and leaves everything to NCCL.
type Config struct {
	// NonBlocking makes the calls of the communicator return before they are done, so that waiting for them can be given up.
	// NCCL then starts a thread for every collective, too.
	NonBlocking bool
	// MinCTAs and MaxCTAs bound the number of blocks of NCCL's kernels; 0 leaves it to NCCL.
	MinCTAs, MaxCTAs int
}

// ConfigLayout is ncclConfig_t of NCCL 2.27 (nccl.h, 72 bytes). Newer ones have more fields at the end, older ones fewer; NCCL
// copies as many bytes as both sides know.
type ConfigLayout struct {
	Size           uintptr
	Magic          uint32
	Version        uint32
	Blocking       int32
	CgaClusterSize int32
	MinCTAs        int32
	MaxCTAs        int32
	NetName        uintptr
	SplitShare     int32
	TrafficClass   int32
	CommName       uintptr
	CollnetEnable  int32
	CTAPolicy      int32
	ShrinkShare    int32
	NvlsCTAs       int32
}

const (
	configBytes   = 72
	configMagic   = 0xcafebeef
	configVersion = 22700
	undefined     = math.MinInt32 // NCCL_CONFIG_UNDEF_INT
)

// layout is what the library is given; nil is the zero Config.
func (c *Config) layout(v Version) *ConfigLayout {
	if c == nil {
		c = &Config{}
	}
	number := func(n int) int32 {
		if n == 0 {
			return undefined
		}
		return int32(n)
	}
	l := &ConfigLayout{
		Size: configBytes, Magic: configMagic, Version: uint32(min(v, configVersion)), Blocking: 1, CgaClusterSize: undefined,
		MinCTAs: number(c.MinCTAs), MaxCTAs: number(c.MaxCTAs), SplitShare: undefined, TrafficClass: undefined, CollnetEnable: undefined,
		CTAPolicy: undefined, ShrinkShare: undefined, NvlsCTAs: undefined,
	}
	if c.NonBlocking {
		l.Blocking = 0
	}
	return l
}
