package backend

import "context"

// Preflighter is a Factory whose library may end the process that it is started in, and that can try it.
type Preflighter interface {
	// Preflight starts what the backend stands on, uses it and ends it again, with this process as the only rank. It is meant
	// for a process that lives for nothing else, because it may end it. An error says what is wrong and what to do.
	Preflight(ctx context.Context, env *Env) error
}
