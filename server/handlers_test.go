package server

import "berth/sandbox"

// Handlers are the default one by both names, and one whose program is missing.
func (f *fakePods) Handlers() []sandbox.HandlerInfo {
	return []sandbox.HandlerInfo{
		{RecursiveReadOnly: true},
		{Name: "berth", RecursiveReadOnly: true},
		{Name: "gone", Path: "/no/such/runtime", Problem: "it is not there"},
	}
}
