package backend

import "context"

// Preflighter is a Factory whose library may end the process in which it is started, and which can try that.
type Preflighter interface {
	// Preflight starts the backend's library, uses it and ends it again, with this process as the only rank. It is meant for a process of its own,
	// because it may end the process. The error says what is wrong and what to do.
	Preflight(ctx context.Context, env *Env) error
}
