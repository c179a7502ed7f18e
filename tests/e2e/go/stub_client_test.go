// A stranger's Go client: stubs generated from proto/ alone, nothing of ours.
// go_client_test.py builds it and runs it with the address of a live quantd.

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"math"
	"os"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	v1 "quantd/v1"
)

const (
	elements   = 5000
	chunkBytes = 4096
	deadline   = 4 * time.Minute
)

var connection *grpc.ClientConn

func TestMain(m *testing.M) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	var err error
	connection, err = grpc.DialContext(ctx, os.Getenv("QUANTD_ADDRESS"),
		grpc.WithInsecure(), grpc.WithBlock())
	if err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// values between -1 and 1, as the wire has them: little-endian.
func values() ([]float32, []byte) {
	reals := make([]float32, elements)
	state := uint32(12345)
	for i := range reals {
		state = state*1103515245 + 12345
		reals[i] = float32(state)/(1<<31) - 1
		if i%7 == 0 {
			reals[i] = float32(i%128)/128 - 0.5 // every other one halfway between codes
		}
	}
	var data bytes.Buffer
	binary.Write(&data, binary.LittleEndian, reals)
	return reals, data.Bytes()
}

func header(scale ...float32) *v1.QuantizeHeader {
	return &v1.QuantizeHeader{
		Tensor: &v1.TensorDescription{
			Name:        &v1.TensorName{Model: "acme/net", Tensor: "w"},
			ElementType: v1.ElementType_ELEMENT_TYPE_FLOAT32,
			Shape:       []int64{elements},
		},
		EncodingSource: &v1.QuantizeHeader_Encoding{Encoding: &v1.Encoding{
			Format: v1.NumberFormat_NUMBER_FORMAT_INT8, Scale: scale}},
	}
}

// quantize sends a tensor in chunks and reads its answer: the codes, or the
// error that ended this tensor, but not the stream.
func quantize(t *testing.T, stream v1.QuantizationService_QuantizeClient,
	header *v1.QuantizeHeader, data []byte) ([]byte, *v1.TensorError) {
	for at := 0; at < len(data); at += chunkBytes {
		end := at + chunkBytes
		if end > len(data) {
			end = len(data)
		}
		message := &v1.QuantizeRequest{
			Header: header, Offset: uint64(at), Data: data[at:end]}
		if err := stream.Send(message); err != nil {
			t.Fatal(err)
		}
		header = nil // goes with the first chunk only
	}
	var codes []byte
	for {
		answer, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		codes = append(codes, answer.Data...)
		if answer.Error != nil || answer.Summary != nil {
			return codes, answer.Error
		}
	}
}

func open(t *testing.T) v1.QuantizationService_QuantizeClient {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	t.Cleanup(cancel)
	stream, err := v1.NewQuantizationServiceClient(connection).Quantize(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// reason is the word to program against, of google.rpc.ErrorInfo.
func reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return ""
}

func TestQuantizesATensorInChunksLikeTheFormula(t *testing.T) {
	reals, data := values()
	const scale = 1.0 / 64
	stream := open(t)
	codes, failed := quantize(t, stream, header(scale), data)
	if failed != nil {
		t.Fatal(failed)
	}
	if len(codes) != elements {
		t.Fatalf("got %d codes, want %d", len(codes), elements)
	}
	for i, x := range reals {
		want := int8(math.RoundToEven(float64(x / scale)))
		if int8(codes[i]) != want {
			t.Fatalf("code %d of %g is %d, want %d", i, x, int8(codes[i]), want)
		}
	}
	stream.CloseSend()
	if _, err := stream.Recv(); err != io.EOF {
		t.Fatal(err)
	}
}

func TestAnErrorEndsItsTensorAndNotTheStream(t *testing.T) {
	_, data := values()
	stream := open(t)
	if _, failed := quantize(t, stream, header(1, 2), data); failed.GetReason() !=
		"SCALE_COUNT" {
		t.Fatal(failed)
	}
	if _, failed := quantize(t, stream, header(1), data); failed != nil {
		t.Fatal(failed)
	}
}

func TestTheStatusOfAStreamTellsItsReason(t *testing.T) {
	stream := open(t)
	// No tensor was opened.
	stream.Send(&v1.QuantizeRequest{Data: make([]byte, 4)})
	_, err := stream.Recv()
	if status.Code(err) != codes.InvalidArgument || reason(err) != "HEADER_MISSING" {
		t.Fatal(err)
	}
}

func TestWhatIsNotStoredIsNotFound(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	_, err := v1.NewEncodingServiceClient(connection).GetEncoding(ctx,
		&v1.GetEncodingRequest{
			Name: &v1.TensorName{Model: "acme/net", Tensor: "nothing"}})
	if status.Code(err) != codes.NotFound || reason(err) != "ENCODING_NOT_FOUND" {
		t.Fatal(err)
	}
}
