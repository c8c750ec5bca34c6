package nccl

import "math"

// Config sets how a communicator works. The zero Config blocks and leaves everything to NCCL.
type Config struct {
	// NonBlocking makes the calls of the communicator return before they are done, so that waiting for them can be given up. NCCL then also starts a
	// thread for every collective.
	NonBlocking bool
	// MinCTAs and MaxCTAs bound the number of blocks of NCCL's kernels; 0 leaves it to NCCL.
	MinCTAs, MaxCTAs int
	// NoMulticast keeps NCCL's own collectives from using NVLink multicast. From NCCL 2.32 on this is a setting of the communicator; before, only the
	// environment of the process can say so, see [Options].Multicast.
	NoMulticast bool
}

// ConfigLayout is ncclConfig_t of NCCL 2.32 (nccl.h, 120 bytes); the tags are its names there. Each version adds fields at the end; NCCL copies as
// many bytes as Size says, and no more than it knows. Older libraries receive the beginning, as NCCL 2.27 has it.
type ConfigLayout struct {
	Size           uintptr `c:"size"`
	Magic          uint32  `c:"magic"`
	Version        uint32  `c:"version"`
	Blocking       int32   `c:"blocking"`
	CgaClusterSize int32   `c:"cgaClusterSize"`
	MinCTAs        int32   `c:"minCTAs"`
	MaxCTAs        int32   `c:"maxCTAs"`
	NetName        uintptr `c:"netName"`
	SplitShare     int32   `c:"splitShare"`
	TrafficClass   int32   `c:"trafficClass"`
	CommName       uintptr `c:"commName"`
	CollnetEnable  int32   `c:"collnetEnable"`
	CTAPolicy      int32   `c:"CTAPolicy"`
	ShrinkShare    int32   `c:"shrinkShare"`
	NvlsCTAs       int32   `c:"nvlsCTAs"`

	NChannelsPerNetPeer int32 `c:"nChannelsPerNetPeer"` // from here on those that came after 2.27
	NvlinkCentricSched  int32 `c:"nvlinkCentricSched"`
	GraphUsageMode      int32 `c:"graphUsageMode"`
	NumRmaCtx           int32 `c:"numRmaCtx"`
	MaxP2pPeers         int32 `c:"maxP2pPeers"`
	GraphStreamOrdering int32 `c:"graphStreamOrdering"`
	LaunchOrderImplicit int32 `c:"launchOrderImplicit"`
	NumRmaSig           int32 `c:"numRmaSig"`
	RmaEagerInit        int32 `c:"rmaEagerInit"`
	HostCftMode         int32 `c:"hostCftMode"`
	NvlsHostMode        int32 `c:"nvlsHostMode"`
}

const (
	configBytes     = 72 // of 2.27
	configVersion   = 22700
	configBytes232  = 120 // of 2.32, the first with nvlsHostMode
	configFirst232  = 23200
	configLatest    = 23203 // the newest header that the layout was compared with
	configMagic     = 0xcafebeef
	undefined       = math.MinInt32 // NCCL_CONFIG_UNDEF_INT
	nvlsHostDisable = math.MaxInt32 // ncclNvlsHostModeDisable
)

// layout returns what is passed to the library; nil is the zero Config.
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
		NChannelsPerNetPeer: undefined, NvlinkCentricSched: undefined, GraphUsageMode: undefined, NumRmaCtx: undefined, MaxP2pPeers: undefined,
		GraphStreamOrdering: undefined, LaunchOrderImplicit: undefined, NumRmaSig: undefined, RmaEagerInit: undefined, HostCftMode: undefined,
		NvlsHostMode: undefined,
	}
	if v >= configFirst232 {
		l.Size, l.Version = configBytes232, uint32(min(v, configLatest))
		if c.NoMulticast {
			l.NvlsHostMode = nvlsHostDisable
		}
	}
	if c.NonBlocking {
		l.Blocking = 0
	}
	return l
}
