package nccl

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/symmem/symmem/internal/dl"
)

// CommHandle is an ncclComm_t.
type CommHandle uintptr

// WindowHandle is an ncclWindow_t: from NCCL 2.28 on the address of a structure in the GPU's memory, see [WindowLayout].
type WindowHandle uint64

// Team is an ncclTeam_t: some of a communicator's ranks, Stride apart.
type Team struct {
	Ranks  int32 `c:"nRanks"`
	Rank   int32 `c:"rank"`
	Stride int32 `c:"stride"`
}

// Functions is the part of NCCL that this module uses, one function for each symbol, which the tags name. Each has the type that nccl.h declares,
// with addresses and handles as numbers. A nil function is one that the library lacks: a missing capability, which [Library.Require] turns into an
// error. A test may substitute its own.
//
// Pointers are used during the call only, unless a comment says otherwise.
type Functions struct {
	GetVersion     func(version *int32) Result             `nccl:"ncclGetVersion,required"`
	GetUniqueID    func(id *UniqueID) Result               `nccl:"ncclGetUniqueId,required"`
	GetErrorString func(r Result) string                   `nccl:"ncclGetErrorString,required"`
	GetLastError   func(comm CommHandle) string            `nccl:"ncclGetLastError,required"` // of the whole process; comm is not looked at
	CommDestroy    func(comm CommHandle) Result            `nccl:"ncclCommDestroy,required"`
	CommAbort      func(comm CommHandle) Result            `nccl:"ncclCommAbort,required"`
	CommFinalize   func(comm CommHandle) Result            `nccl:"ncclCommFinalize,required"`
	CommAsyncError func(comm CommHandle, r *Result) Result `nccl:"ncclCommGetAsyncError,required"`
	CommCount      func(comm CommHandle, n *int32) Result  `nccl:"ncclCommCount,required"`
	CommCuDevice   func(comm CommHandle, n *int32) Result  `nccl:"ncclCommCuDevice,required"`
	CommUserRank   func(comm CommHandle, n *int32) Result  `nccl:"ncclCommUserRank,required"`

	// The function that takes the id by address: ncclCommInitRank takes its 128 bytes by value. The handle of a communicator that does not block is
	// written to comm at once, while its initialisation goes on.
	CommInitRankScalable func(comm *CommHandle, ranks, rank, ids int32, id *UniqueID, config *ConfigLayout) Result `nccl:"ncclCommInitRankScalable,required"`
	// comm may be written after the call, when the parent does not block.
	CommSplit func(parent CommHandle, color, key int32, comm *CommHandle, config *ConfigLayout) Result `nccl:"ncclCommSplit"`

	AllReduce func(send, recv uint64, count uintptr, t DataType, op Op, comm CommHandle, stream uintptr) Result `nccl:"ncclAllReduce,required"`

	Broadcast     func(send, recv uint64, count uintptr, t DataType, root int32, comm CommHandle, stream uintptr) Result        `nccl:"ncclBroadcast"`
	Reduce        func(send, recv uint64, count uintptr, t DataType, op Op, root int32, comm CommHandle, stream uintptr) Result `nccl:"ncclReduce"`
	AllGather     func(send, recv uint64, count uintptr, t DataType, comm CommHandle, stream uintptr) Result                    `nccl:"ncclAllGather"`
	ReduceScatter func(send, recv uint64, count uintptr, t DataType, op Op, comm CommHandle, stream uintptr) Result             `nccl:"ncclReduceScatter"`
	AllToAll      func(send, recv uint64, count uintptr, t DataType, comm CommHandle, stream uintptr) Result                    `nccl:"ncclAlltoAll"`

	// The n-th that a rank sends to another is the n-th that the other receives from it. What ranks send each other is in one group on each: outside of groups,
	// a stream does not go on before the other rank has come.
	Send func(p uint64, count uintptr, t DataType, peer int32, comm CommHandle, stream uintptr) Result `nccl:"ncclSend"`
	Recv func(p uint64, count uintptr, t DataType, peer int32, comm CommHandle, stream uintptr) Result `nccl:"ncclRecv"`

	// Puts to a rank of the communicator, from memory that is a symmetric window of it to one of the rank's, and the rank's counter of signals of this
	// one behind it. It is enqueued like a collective, and nobody waits for it.
	PutSignal func(send uint64, count uintptr, t DataType, peer int32, window WindowHandle, offset uintptr, signal, context int32, flags uint32,
		comm CommHandle, stream uintptr) Result `nccl:"ncclPutSignal"`

	// A thread's calls between the two are one group.
	GroupStart func() Result `nccl:"ncclGroupStart"`
	GroupEnd   func() Result `nccl:"ncclGroupEnd"`

	MemAlloc func(p *uint64, bytes uintptr) Result `nccl:"ncclMemAlloc"`
	MemFree  func(p uint64) Result                 `nccl:"ncclMemFree"`

	// window may be written after the call, when the communicator does not block.
	CommWindowRegister   func(comm CommHandle, p uint64, bytes uintptr, window *WindowHandle, flags WindowFlags) Result `nccl:"ncclCommWindowRegister"`
	CommWindowDeregister func(comm CommHandle, window WindowHandle) Result                                              `nccl:"ncclCommWindowDeregister"`
	// All zero if there is none.
	TeamLsa func(comm CommHandle) Team `nccl:"ncclTeamLsa"`
	// *p is 0 where there is no address.
	GetPeerDevicePointer func(window WindowHandle, offset uintptr, rank int32, p *uint64) Result `nccl:"ncclGetPeerDevicePointer"`

	// comm may be written after the call, when the communicator does not block.
	DevCommCreate  func(comm CommHandle, requirements, devComm *byte) Result `nccl:"ncclDevCommCreate"`
	DevCommDestroy func(comm CommHandle, devComm *byte) Result               `nccl:"ncclDevCommDestroy"`

	// props is an ncclCommProperties_t whose header is filled in.
	CommQueryProperties func(comm CommHandle, props *byte) Result `nccl:"ncclCommQueryProperties"`

	// MulticastSource looks up the functions that find or make multicast addresses. They are not in the table, because they may create a multicast
	// object. Only [Library.ResolveMulticast] calls it. Nil means that the library has none.
	MulticastSource func() (*Multicast, error)
}

// Multicast holds the function that returns a window's multicast address, which it first makes if need be.
type Multicast struct {
	// *p is 0 where NCCL has none.
	GetLsaMultimemDevicePointer func(window WindowHandle, offset uintptr, p *uint64) Result `nccl:"ncclGetLsaMultimemDevicePointer,required"`
}

// introduced is the first version that has a symbol.
var introduced = map[string]Version{
	"ncclCommFinalize": 21403, "ncclCommSplit": 21801, "ncclMemAlloc": 21901, "ncclMemFree": 21901, "ncclCommInitRankScalable": 22304,
	"ncclCommWindowRegister": 22703, "ncclCommWindowDeregister": 22703, "ncclTeamLsa": 22803, "ncclAlltoAll": 22803, "ncclDevCommCreate": 22803,
	"ncclDevCommDestroy": 22803, "ncclCommQueryProperties": 22902, "ncclGetPeerDevicePointer": 22902, "ncclGetLsaMultimemDevicePointer": 22902,
	"ncclPutSignal": 22902,
}

// eachFunction calls fn for every function of the table that p points to.
func eachFunction(p any, fn func(field reflect.Value, symbol string, required bool)) {
	v := reflect.ValueOf(p).Elem()
	for i := range v.NumField() {
		if tag, ok := v.Type().Field(i).Tag.Lookup("nccl"); ok {
			symbol, rest, _ := strings.Cut(tag, ",")
			fn(v.Field(i), symbol, rest == "required")
		}
	}
}

// missing returns the symbols whose functions are nil in the table that p points to.
func missing(p any, onlyRequired bool) []string {
	var symbols []string
	eachFunction(p, func(field reflect.Value, symbol string, required bool) {
		if field.IsNil() && (required || !onlyRequired) {
			symbols = append(symbols, symbol)
		}
	})
	return symbols
}

// bind fills the table that p points to with those of its functions that the library has.
func bind(lib *dl.Library, p any) error {
	var failed error
	eachFunction(p, func(field reflect.Value, symbol string, _ bool) {
		err := lib.Bind(field.Addr().Interface(), symbol)
		if _, lacking := errors.AsType[*dl.SymbolError](err); err != nil && !lacking && failed == nil {
			failed = fmt.Errorf("binding %s: %w", libraryName, err)
		}
	})
	return failed
}

// Missing returns the symbols that the library lacks, in the order of the table.
func (l *Library) Missing() []string { return missing(&l.call, false) }

// Require returns ErrUnsupported if the library lacks any of the named symbols, and says which version has them.
func (l *Library) Require(symbols ...string) error {
	all := l.Missing()
	lacking := slices.DeleteFunc(slices.Clone(symbols), func(s string) bool { return !slices.Contains(all, s) })
	if len(lacking) == 0 {
		return nil
	}
	var since Version
	for _, s := range lacking {
		since = max(since, introduced[s])
	}
	e := &dl.SymbolError{Library: fmt.Sprintf("%s %s (%s)", libraryName, l.version, l.path), Symbols: lacking}
	if since > 0 {
		e.Hint = fmt.Sprintf("%s %s or newer has what is missing; name its file in %s", libraryName, since, LibraryEnv)
	}
	return e
}

// ResolveMulticast looks up the function that returns multicast addresses of windows. Nothing else does. The error is ErrUnsupported if the library
// does not have it.
func (l *Library) ResolveMulticast() (*Multicast, error) {
	if l.call.MulticastSource == nil {
		return nil, &dl.SymbolError{Library: libraryName, Symbols: []string{"ncclGetLsaMultimemDevicePointer"},
			Hint: "NCCL 2.29.2 or newer has it"}
	}
	return l.call.MulticastSource()
}
