package lazy

import (
	"sync"
	"time"
)

const (
	// minMeasured is how many bytes a pull must have received before its speed counts.
	minMeasured = 4 << 20
	// maxRates limits the registries whose speed is known. Clients choose their names.
	maxRates = 64
)

// rates are the speeds of recent pulls, by registry host. The zero value is ready to use.
type rates struct {
	mu sync.Mutex // guards byHost
	// +checklocks:mu
	byHost map[string]float64 // bytes a second; each pull counts as much as all earlier pulls together
}

// observe notes a pull that has received bytes from a registry.
func (r *rates) observe(host string, bytes int64, took time.Duration) {
	if bytes < minMeasured || took <= 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := float64(bytes) / took.Seconds()
	if before, known := r.byHost[host]; known {
		now = (before + now) / 2
	} else if len(r.byHost) >= maxRates {
		for other := range r.byHost {
			delete(r.byHost, other)
			break
		}
	}
	if r.byHost == nil {
		r.byHost = map[string]float64{}
	}
	r.byHost[host] = now
}

// estimate returns how long a pull of so many bytes takes, or 0 if that is not known.
func (r *rates) estimate(host string, bytes int64) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	rate := r.byHost[host]
	if rate <= 0 {
		return 0
	}
	return time.Duration(float64(bytes) / rate * float64(time.Second))
}
