package nri

import (
	"context"
	"fmt"
	"sync"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// The library (0.12.5) decodes evictions that plugins request, but has no callback for them. The
// interceptors below read them from the plugins' messages and collect them in the request's
// context.

const (
	methodCreateContainer  = "/nri.pkg.api.v1alpha1.Plugin/CreateContainer"
	methodUpdateContainer  = "/nri.pkg.api.v1alpha1.Plugin/UpdateContainer"
	methodUpdateContainers = "/nri.pkg.api.v1alpha1.Runtime/UpdateContainers"
)

// evictions collects the evictions of one request from all plugins.
type evictions struct {
	mu sync.Mutex
	// +checklocks:mu
	list []*api.ContainerEviction
}

type evictionsKey struct{}

// withEvictions returns a context that collects evictions: those in plugins' answers to requests,
// and those in plugins' own requests.
func withEvictions(ctx context.Context) (context.Context, *evictions) {
	e := &evictions{}
	return context.WithValue(ctx, evictionsKey{}, e), e
}

// collect adds evictions to the request of ctx, if ctx comes from withEvictions.
func collect(ctx context.Context, list []*api.ContainerEviction) {
	e, collects := ctx.Value(evictionsKey{}).(*evictions)
	if !collects {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, list...)
}

// updates returns the evictions as updates. A failed eviction fails no request, because the
// container may have exited.
func (e *evictions) updates() []Update {
	e.mu.Lock()
	defer e.mu.Unlock()
	var updates []Update
	for _, asked := range e.list {
		updates = append(updates, Update{
			ContainerID:   asked.GetContainerId(),
			Evict:         true,
			Reason:        asked.GetReason(),
			IgnoreFailure: true,
		})
	}
	return updates
}

// interceptors returns the options that make the library's connections collect evictions.
func interceptors() ([]ttrpc.ClientOpts, []ttrpc.ServerOpt) {
	return []ttrpc.ClientOpts{ttrpc.WithChainUnaryClientInterceptor(answered)},
		[]ttrpc.ServerOpt{ttrpc.WithChainUnaryServerInterceptor(asked)}
}

// answered collects the evictions in a plugin's answer.
func answered(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, info *ttrpc.UnaryClientInfo,
	call ttrpc.Invoker) error {
	if err := call(ctx, request, response); err != nil {
		return err
	}
	var answer interface {
		proto.Message
		GetEvict() []*api.ContainerEviction
	}
	switch info.FullMethod {
	case methodCreateContainer:
		answer = &api.CreateContainerResponse{}
	case methodUpdateContainer:
		answer = &api.UpdateContainerResponse{}
	default:
		return nil
	}
	if status := response.GetStatus(); status != nil && status.Code != int32(codes.OK) {
		return nil // the plugin refuses the request
	}
	if err := proto.Unmarshal(response.GetPayload(), answer); err != nil {
		return fmt.Errorf("decode NRI plugin answer to %s: %w", info.FullMethod, err)
	}
	collect(ctx, answer.GetEvict())
	return nil
}

// asked collects the evictions in a request of a plugin.
func asked(ctx context.Context, decode ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo,
	handle ttrpc.Method) (any, error) {
	if info.FullMethod != methodUpdateContainers {
		return handle(ctx, decode)
	}
	ctx, _ = withEvictions(ctx)
	return handle(ctx, func(message any) error {
		if err := decode(message); err != nil {
			return err
		}
		if request, ok := message.(*api.UpdateContainersRequest); ok {
			collect(ctx, request.GetEvict())
		}
		return nil
	})
}
