/* Prints the layouts and values of the verbs API that verifier.c relies on; check.sh compares two headers by it. */
#include <infiniband/verbs.h>
#include <stdio.h>

#define SIZE(type) printf(#type " %zu\n", sizeof(type))
#define AT(type, field) printf(#type "." #field " %zu+%zu\n", offsetof(type, field), sizeof((type *)0)->field)
#define VALUE(name) printf(#name " %d\n", (int)(name))

static void requests(void)
{
    SIZE(struct ibv_sge);
    AT(struct ibv_sge, addr), AT(struct ibv_sge, length), AT(struct ibv_sge, lkey);
    SIZE(struct ibv_send_wr);
    AT(struct ibv_send_wr, wr_id), AT(struct ibv_send_wr, next), AT(struct ibv_send_wr, sg_list);
    AT(struct ibv_send_wr, num_sge), AT(struct ibv_send_wr, opcode), AT(struct ibv_send_wr, send_flags);
    AT(struct ibv_send_wr, imm_data), AT(struct ibv_send_wr, wr.rdma.remote_addr), AT(struct ibv_send_wr, wr.rdma.rkey);
    SIZE(struct ibv_recv_wr);
    AT(struct ibv_recv_wr, wr_id), AT(struct ibv_recv_wr, next), AT(struct ibv_recv_wr, sg_list);
    AT(struct ibv_recv_wr, num_sge);
    SIZE(struct ibv_wc);
    AT(struct ibv_wc, wr_id), AT(struct ibv_wc, status), AT(struct ibv_wc, opcode), AT(struct ibv_wc, vendor_err);
    AT(struct ibv_wc, byte_len), AT(struct ibv_wc, imm_data), AT(struct ibv_wc, qp_num), AT(struct ibv_wc, wc_flags);
}

static void objects(void)
{
    AT(struct ibv_context, ops.poll_cq), AT(struct ibv_context, ops.req_notify_cq);
    AT(struct ibv_context, ops.post_send), AT(struct ibv_context, ops.post_recv);
    SIZE(struct ibv_context_ops);
    AT(struct ibv_cq, context), AT(struct ibv_qp, context), AT(struct ibv_qp, qp_num), AT(struct ibv_qp, state);
    SIZE(struct ibv_mr);
    AT(struct ibv_mr, addr), AT(struct ibv_mr, length), AT(struct ibv_mr, lkey), AT(struct ibv_mr, rkey);
}

static void attributes(void)
{
    SIZE(union ibv_gid), SIZE(struct ibv_global_route), SIZE(struct ibv_ah_attr);
    AT(struct ibv_ah_attr, grh.dgid), AT(struct ibv_ah_attr, grh.sgid_index), AT(struct ibv_ah_attr, grh.hop_limit);
    AT(struct ibv_ah_attr, is_global), AT(struct ibv_ah_attr, port_num), AT(struct ibv_ah_attr, dlid);
    SIZE(struct ibv_qp_init_attr);
    AT(struct ibv_qp_init_attr, send_cq), AT(struct ibv_qp_init_attr, cap.max_inline_data);
    AT(struct ibv_qp_init_attr, qp_type), AT(struct ibv_qp_init_attr, sq_sig_all);
    SIZE(struct ibv_qp_attr);
    AT(struct ibv_qp_attr, qp_state), AT(struct ibv_qp_attr, path_mtu), AT(struct ibv_qp_attr, rq_psn);
    AT(struct ibv_qp_attr, sq_psn), AT(struct ibv_qp_attr, dest_qp_num), AT(struct ibv_qp_attr, qp_access_flags);
    AT(struct ibv_qp_attr, ah_attr), AT(struct ibv_qp_attr, pkey_index), AT(struct ibv_qp_attr, max_rd_atomic);
    AT(struct ibv_qp_attr, max_dest_rd_atomic), AT(struct ibv_qp_attr, min_rnr_timer), AT(struct ibv_qp_attr, port_num);
    AT(struct ibv_qp_attr, timeout), AT(struct ibv_qp_attr, retry_cnt), AT(struct ibv_qp_attr, rnr_retry);
    SIZE(struct ibv_port_attr);
    AT(struct ibv_port_attr, state), AT(struct ibv_port_attr, active_mtu), AT(struct ibv_port_attr, lid);
    AT(struct ibv_port_attr, link_layer);
}

static void values(void)
{
    VALUE(IBV_ACCESS_LOCAL_WRITE), VALUE(IBV_ACCESS_REMOTE_READ), VALUE(IBV_ACCESS_REMOTE_WRITE);
    VALUE(IBV_QPS_INIT), VALUE(IBV_QPS_RTR), VALUE(IBV_QPS_RTS), VALUE(IBV_QPS_ERR), VALUE(IBV_QPT_RC), VALUE(IBV_QPT_UD);
    VALUE(IBV_QP_STATE), VALUE(IBV_QP_ACCESS_FLAGS), VALUE(IBV_QP_PKEY_INDEX), VALUE(IBV_QP_PORT), VALUE(IBV_QP_AV);
    VALUE(IBV_QP_PATH_MTU), VALUE(IBV_QP_TIMEOUT), VALUE(IBV_QP_RETRY_CNT), VALUE(IBV_QP_RNR_RETRY), VALUE(IBV_QP_RQ_PSN);
    VALUE(IBV_QP_MAX_QP_RD_ATOMIC), VALUE(IBV_QP_MIN_RNR_TIMER), VALUE(IBV_QP_SQ_PSN), VALUE(IBV_QP_MAX_DEST_RD_ATOMIC);
    VALUE(IBV_QP_DEST_QPN), VALUE(IBV_MTU_4096), VALUE(IBV_PORT_ACTIVE);
    VALUE(IBV_WR_RDMA_WRITE), VALUE(IBV_WR_RDMA_WRITE_WITH_IMM), VALUE(IBV_WR_SEND), VALUE(IBV_WR_SEND_WITH_IMM);
    VALUE(IBV_WR_RDMA_READ), VALUE(IBV_SEND_FENCE), VALUE(IBV_SEND_SIGNALED), VALUE(IBV_SEND_INLINE);
    VALUE(IBV_WC_SUCCESS), VALUE(IBV_WC_WR_FLUSH_ERR), VALUE(IBV_WC_RETRY_EXC_ERR), VALUE(IBV_WC_REM_ABORT_ERR);
    VALUE(IBV_WC_FATAL_ERR), VALUE(IBV_WC_RESP_TIMEOUT_ERR), VALUE(IBV_WC_GENERAL_ERR);
    VALUE(IBV_WC_SEND), VALUE(IBV_WC_RDMA_WRITE), VALUE(IBV_WC_RDMA_READ), VALUE(IBV_WC_RECV);
    VALUE(IBV_WC_RECV_RDMA_WITH_IMM), VALUE(IBV_WC_WITH_IMM);
}

int main(void)
{
    requests();
    objects();
    attributes();
    values();
    return 0;
}
