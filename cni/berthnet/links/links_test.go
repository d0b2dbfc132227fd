package links

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"berth/internal/lockfile"
	"berth/internal/netns"
	"berth/internal/testutil"
)

// MakeBridge claims the network's bridge even after a kill half-way. It does not claim a bridge
// that another program creates at the same time.
func TestMakeBridge(t *testing.T) {
	testutil.NeedRoot(t)
	d := &Description{Name: "bn0", Network: "net-1", MTU: 1400}
	for _, begun := range []bool{false, true} {
		t.Run(fmt.Sprintf("begun=%t", begun), func(t *testing.T) {
			err := netns.InNew(func() error {
				if begun {
					if _, err := newBridge(d); err != nil {
						return err
					}
				}
				b, err := MakeBridge(d)
				if err != nil {
					return err
				}
				if owner, made := b.owner(); owner != "net-1" || !made || b.MTU != 1400 {
					return fmt.Errorf("it is %q's, made %v, MTU %d", owner, made, b.MTU)
				}
				return nil
			})
			if err != nil {
				t.Errorf("the bridge, begun before %v: %v", begun, err)
			}
		})
	}
	err := netns.InNew(func() error {
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bn0", MTU: 1300}}); err != nil {
			return err
		}
		if _, err := newBridge(d); !errors.Is(err, ErrQuicker) {
			return fmt.Errorf("making it: %w", err)
		}
		b, err := FindBridge("bn0")
		if err == nil && (b.alias != "" || b.MTU != 1300) {
			err = fmt.Errorf("it has the alias %q and MTU %d", b.alias, b.MTU)
		}
		return err
	})
	if err != nil {
		t.Errorf("another program's bridge: %v", err)
	}
}

// A waiter for the exclusive lock gets it once the current holders have released it.
func TestLockIsFair(t *testing.T) {
	testutil.NeedRoot(t)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	first, err := Lock(t.Context(), lockfile.Shared)
	testutil.Must(t, err)
	alone := make(chan func(), 1)
	go func() {
		unlock, err := Lock(t.Context(), lockfile.Exclusive)
		if err != nil {
			t.Error(err)
		}
		alone <- unlock
	}()
	for deadline := time.Now().Add(30 * time.Second); ; {
		second, err := Lock(gone, lockfile.Shared)
		if errors.Is(err, context.Canceled) {
			break
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("shared holders starve the waiter; %v", err)
		}
		second()
	}
	first()
	(<-alone)()
	last, err := Lock(t.Context(), lockfile.Shared)
	testutil.Must(t, err)
	last()
}

// A stuck holder of the lock delays others for a limited time. Their error names the lock.
func TestStuckBridgeLockIsReported(t *testing.T) {
	testutil.NeedRoot(t)
	unlock, err := Lock(t.Context(), lockfile.Exclusive)
	testutil.Must(t, err)
	for _, mode := range []lockfile.Mode{lockfile.Shared, lockfile.Exclusive} {
		_, err := lockWithin(t.Context(), mode, time.Millisecond)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), lockPath) {
			t.Errorf("with mode %d: %v", mode, err)
		}
	}
	unlock()
	unlock, err = Lock(t.Context(), lockfile.Exclusive)
	testutil.Must(t, err)
	unlock()
}
