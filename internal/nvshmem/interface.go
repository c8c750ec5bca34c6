package nvshmem

// Calls is what a backend calls of NVSHMEM. [Library] says what each of the calls needs.
type Calls interface {
	Version() Version
	Path() string
	Bootstrap() string
	Settings() []Setting

	NewUniqueID() (*UniqueID, error)
	Start(pes, pe int, id *UniqueID) error
	Finalize() error
	Align(alignment, bytes int64) (uint64, error)
	Ptr(p uint64, pe int) (uint64, error)
	Register(p uint64, bytes int64) (uint64, error)
	Unregister(alias uint64, bytes int64) error
	NewTeam() (Team, error)
	Barrier(team Team, stream uintptr) error
	Collective(what, dtype, op string) (Collective, error)
	MulticastPtr(p uint64) (uint64, error)
}

var _ Calls = (*Library)(nil)
