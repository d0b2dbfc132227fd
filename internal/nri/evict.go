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

// The library (0.12.5) decodes the evictions that plugins ask for and drops them: it has no call for them. They are read
// where they pass, in the messages of plugins, and travel with the context of the request that they are part of.

const (
	methodCreateContainer  = "/nri.pkg.api.v1alpha1.Plugin/CreateContainer"
	methodUpdateContainer  = "/nri.pkg.api.v1alpha1.Plugin/UpdateContainer"
	methodUpdateContainers = "/nri.pkg.api.v1alpha1.Runtime/UpdateContainers"
)

// evictions are those asked for in the course of one request, by any number of plugins. The lock guards the list.
type evictions struct {
	mu   sync.Mutex
	list []*api.ContainerEviction
}

type evictionsKey struct{}

// withEvictions returns a context under which requests to plugins, and of plugins, collect evictions.
func withEvictions(ctx context.Context) (context.Context, *evictions) {
	e := &evictions{}
	return context.WithValue(ctx, evictionsKey{}, e), e
}

// collect adds evictions to those of the request that ctx is of. Other requests have none.
func collect(ctx context.Context, list []*api.ContainerEviction) {
	e, collects := ctx.Value(evictionsKey{}).(*evictions)
	if !collects {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, list...)
}

// updates returns the evictions as what is to be done to containers. They fail no request: the container may have ended.
func (e *evictions) updates() []Update {
	e.mu.Lock()
	defer e.mu.Unlock()
	var updates []Update
	for _, asked := range e.list {
		updates = append(updates, Update{ContainerID: asked.GetContainerId(), Evict: true, Reason: asked.GetReason(), IgnoreFailure: true})
	}
	return updates
}

// interceptors returns the options of the library's connections that see the evictions.
func interceptors() ([]ttrpc.ClientOpts, []ttrpc.ServerOpt) {
	return []ttrpc.ClientOpts{ttrpc.WithChainUnaryClientInterceptor(answered)},
		[]ttrpc.ServerOpt{ttrpc.WithChainUnaryServerInterceptor(asked)}
}

// answered collects the evictions in a plugin's answer.
func answered(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, info *ttrpc.UnaryClientInfo, call ttrpc.Invoker) error {
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
		return fmt.Errorf("decode a plugin's answer to %s: %w", info.FullMethod, err)
	}
	collect(ctx, answer.GetEvict())
	return nil
}

// asked collects the evictions in a plugin's own request.
func asked(ctx context.Context, decode ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, handle ttrpc.Method) (any, error) {
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
