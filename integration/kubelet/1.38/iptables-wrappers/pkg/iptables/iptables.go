// Package iptables replaces sigs.k8s.io/iptables-wrappers/pkg/iptables in the build of kubelet
// 1.38, because the Go module proxy does not serve that module. It declares what kubelet uses of
// its API. It reports a host without iptables. There kubelet adds none of its iptables rules, which
// only other components use.
package iptables

import (
	"context"
	"time"
)

type (
	// Table is the name of a table.
	Table string
	// Chain is the name of a chain.
	Chain string
	// Protocol is an IP family.
	Protocol string
	// RulePosition is where a rule is added to a chain.
	RulePosition string
	// Mode chooses between the variants of iptables.
	Mode string
)

// The values that kubelet passes.
const (
	TableNAT    Table = "nat"
	TableFilter Table = "filter"
	TableMangle Table = "mangle"

	ChainOutput Chain = "OUTPUT"
	ChainInput  Chain = "INPUT"

	Prepend RulePosition = "-I"
	Append  RulePosition = "-A"

	UseInstalledMode Mode = "installed"
)

// Interface changes the rules of an IP family.
type Interface interface {
	Protocol() Protocol
	IsIPv6() bool
	EnsureChain(ctx context.Context, table Table, chain Chain) (bool, error)
	EnsureRule(ctx context.Context, position RulePosition, table Table, chain Chain, args ...string) (bool, error)
	Monitor(ctx context.Context, canary Chain, tables []Table, reload func(), interval time.Duration)
}

// NewBestEffort returns the IP families whose iptables work, which are none.
func NewBestEffort(context.Context, Mode) map[Protocol]Interface { return nil }
