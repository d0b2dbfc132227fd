package server

import "berth/sandbox/handler"

// Handlers returns the default handler by both names, and a handler with a missing program.
func (f *fakePods) Handlers() []handler.Info {
	return []handler.Info{
		{RecursiveReadOnly: true},
		{Name: "berth", RecursiveReadOnly: true},
		{Name: "gone", Path: "/no/such/runtime", Problem: "it is not there"},
	}
}
